"""`yeto-syncer keys` (S30)."""

from __future__ import annotations

import os
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from syncer.keys import create_all, create_learner, keys, load_authority
from wire.security import SecurityRefused, read_key_file
from wire.tls import allowed_learner_ids

NOW = datetime.now(UTC)


def run(*args: object) -> Result:
    return CliRunner().invoke(keys, [str(arg) for arg in args])


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_init_writes_private_files(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    result = run(
        "init", directory, "--learners", 2, "--host", "syncer.example", "--host", "10.0.0.7"
    )
    assert result.exit_code == 0, result.output
    assert set(snapshot(directory)) == {
        "ca.pem",
        "ca-key.pem",
        "server.pem",
        "server-key.pem",
        "learner-0.pem",
        "learner-0-key.pem",
        "learner-1.pem",
        "learner-1-key.pem",
        "auth.key",
    }
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert len(read_key_file(directory / "auth.key").secret) == 32
    assert (directory / "auth.key").read_text().strip() not in result.output


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_all(tmp_path / "keys", 1, ["localhost"], NOW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "keys").iterdir()} == {0o600}


def test_certificates_say_what_they_are_for(tmp_path: Path) -> None:
    """P-256, lifetimes, SANs and S12 URIs, key usages."""
    create_all(tmp_path, 2, ["syncer.example", "*.example", "10.0.0.7", "[::1]"], NOW)
    ca, server, learner = (
        certificate(tmp_path / f"{name}.pem") for name in ("ca", "server", "learner-1")
    )
    for one, days in ((ca, 3652), (server, 365), (learner, 365)):
        key = one.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        assert abs(one.not_valid_after_utc - NOW - timedelta(days=days)) < timedelta(hours=1)
        assert one.not_valid_before_utc <= NOW
        one.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["syncer.example", "*.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "::1"]
    from cryptography.hazmat.primitives.serialization import Encoding

    assert allowed_learner_ids(learner.public_bytes(Encoding.DER)) == {1}
    assert allowed_learner_ids(server.public_bytes(Encoding.DER)) is None


@pytest.mark.parametrize(("name", "purpose"), [("server", "sslserver"), ("learner-0", "sslclient")])
def test_openssl_accepts_them_strictly(tmp_path: Path, name: str, purpose: str) -> None:
    create_all(tmp_path, 1, ["localhost"], NOW)
    command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile"]
    try:
        done = subprocess.run(
            [*command, tmp_path / "ca.pem", tmp_path / f"{name}.pem"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no openssl command here")
    assert done.returncode == 0, done.stderr
    other = "sslclient" if purpose == "sslserver" else "sslserver"
    wrong = subprocess.run(
        [
            "openssl",
            "verify",
            "-purpose",
            other,
            "-CAfile",
            tmp_path / "ca.pem",
            tmp_path / f"{name}.pem",
        ],
        capture_output=True,
        check=False,
    )
    assert wrong.returncode != 0


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    run("init", directory, "--learners", 1)
    before = snapshot(directory)
    again = run("init", directory, "--learners", 3)
    assert again.exit_code == 2
    assert "never overwritten" in again.output
    repeated = run("add-learner", directory, 0)
    assert repeated.exit_code == 2
    assert snapshot(directory) == before


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "auth.key").symlink_to(tmp_path / "elsewhere")
    assert run("init", tmp_path / "keys").exit_code == 2
    assert not (tmp_path / "elsewhere").exists()
    assert os.listdir(tmp_path / "keys") == ["auth.key"]


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = 0
    real = os.fsync

    def full(descriptor: int) -> None:
        nonlocal done
        done += 1
        if done == 4:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = run("init", tmp_path / "keys", "--learners", 2)
    assert result.exit_code == 1
    assert "No space left" in result.output
    assert os.listdir(tmp_path / "keys") == []


def test_add_learner_uses_the_same_ca(tmp_path: Path) -> None:
    create_all(tmp_path, 0, ["localhost"], NOW)
    result = run("add-learner", tmp_path, 4_294_967_295)
    assert result.exit_code == 0
    new = certificate(tmp_path / "learner-4294967295.pem")
    new.verify_directly_issued_by(certificate(tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    "args",
    [
        ("init", "keys", "--host", "not a name"),
        ("init", "keys", "--host", "-x.example"),
        ("init", "keys", "--host", ""),
        ("init", "keys", "--host", "münchen.example"),
        ("init", "keys", "--learners", "-1"),
        ("init", "keys", "--learners", "nan"),
        ("add-learner", "keys", "0"),
        ("add-learner", "keys", "4294967296"),
        ("show", "keys"),
    ],
)
def test_refusals_exit_2_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert os.listdir(tmp_path) == []


def test_ca_key_must_be_private_and_belong_to_the_ca(tmp_path: Path) -> None:
    create_all(tmp_path / "a", 0, ["localhost"], NOW)
    create_all(tmp_path / "b", 0, ["localhost"], NOW)
    (tmp_path / "a" / "ca-key.pem").chmod(0o644)
    with pytest.raises(SecurityRefused, match="open to group or others"):
        create_learner(tmp_path / "a", 0, NOW)
    (tmp_path / "a" / "ca-key.pem").unlink()
    (tmp_path / "b" / "ca-key.pem").rename(tmp_path / "a" / "ca-key.pem")
    with pytest.raises(SecurityRefused, match="does not belong to the CA"):
        create_learner(tmp_path / "a", 0, NOW)


def test_a_leaf_never_outlives_its_ca(tmp_path: Path) -> None:
    create_all(tmp_path, 0, ["localhost"], NOW)
    authority = load_authority(tmp_path)
    late = authority.certificate.not_valid_after_utc - timedelta(days=3)
    create_learner(tmp_path, 1, late)
    assert certificate(tmp_path / "learner-1.pem").not_valid_after_utc == late + timedelta(days=3)
    with pytest.raises(SecurityRefused, match="expired"):
        create_learner(tmp_path, 2, late + timedelta(days=4))


def test_show_lists_subjects_names_and_expiry_only(tmp_path: Path) -> None:
    create_all(tmp_path, 11, ["syncer.example", "10.0.0.7"], NOW)
    create_learner(tmp_path, 77, NOW - timedelta(days=400))
    result = run("show", tmp_path)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == [
        "ca.pem",
        "server.pem",
        *(f"learner-{n}.pem" for n in range(11)),
        "learner-77.pem",
    ]
    assert "DNS:syncer.example, IP:10.0.0.7" in lines[1]
    assert "URI:urn:yeto:learner:3" in lines[5]
    assert "EXPIRED" in lines[-1]
    assert "EXPIRED" not in lines[-2]
    assert "expires" in lines[1]
    secret = (tmp_path / "auth.key").read_text().strip()
    assert secret not in result.output
    assert "PRIVATE" not in result.output
