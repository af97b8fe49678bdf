"""`yeto-syncer keys`: a private CA, certificates and a shared key in one directory (S30).

| file | content |
|---|---|
| ca.pem, ca-key.pem | the private CA, 10 years |
| server.pem, server-key.pem | the syncer's certificate, 1 year |
| learner-<id>.pem, learner-<id>-key.pem | a learner's, bound to its id by a SAN URI (S12), 1 year |
| auth.key | the shared key that seals HELLO (S5) |
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wire.cli_support import U32_MAX, Whole
from wire.security import SecurityRefused, read_private
from wire.tls import LEARNER_URI

CA_LIFETIME = timedelta(days=3652)
LEAF_LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(minutes=10)
"""Certificates begin so long before now, for machines whose clocks are behind."""
AUTH_KEY_FILE = "auth.key"
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_LEARNERS = 4096
"""Certificates that one `keys init` makes at most."""

_PEM_LIMIT = 1_048_576
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)
_CERTIFICATE_NAME = re.compile(r"ca\.pem|server\.pem|learner-[0-9]+\.pem")


@dataclass(frozen=True, slots=True)
class Authority:
    """The private CA that signs all other certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, now: datetime) -> Authority:
        """A new P-256 CA that may sign leaves only."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"yeto CA {secrets.token_hex(4)}")
        builder = _builder(name, name, key, now, now + CA_LIFETIME)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs=True), True)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        builder = builder.add_extension(identifier, False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Read the CA of a directory that `create` and `write_private` made.

        Raises:
            SecurityRefused: a file is missing, not private, malformed, or they do not belong
                together.
        """
        raw_key = read_private(directory / "ca-key.pem", "CA key", _PEM_LIMIT)
        certificate = _read_certificate(directory / "ca.pem")
        try:
            key = serialization.load_pem_private_key(raw_key, None)
        except (ValueError, TypeError):
            raise SecurityRefused(
                f"CA key {directory / 'ca-key.pem'} is no plain PEM key"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SecurityRefused(f"CA key {directory / 'ca-key.pem'} is no elliptic curve key")
        if certificate.public_key() != key.public_key():
            raise SecurityRefused(f"ca.pem and ca-key.pem in {directory} do not belong together")
        return cls(certificate, key)

    def issue(
        self,
        common_name: str,
        names: Sequence[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        now: datetime,
    ) -> tuple[bytes, bytes]:
        """A certificate with the SANs `names` for one purpose, and its key, both PEM.

        Raises:
            SecurityRefused: the CA itself has expired.
        """
        end = min(now + LEAF_LIFETIME, self.certificate.not_valid_after_utc)
        if end <= now:
            raise SecurityRefused("the CA certificate has expired; make a new key directory")
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject
        builder = _builder(_name(common_name), issuer, key, now, end)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(signs=False), True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(identifier, False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    public = key.public_key()
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise SecurityRefused(f"certificate {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SecurityRefused(f"{path} is no PEM certificate") from None


def server_name(text: str) -> x509.GeneralName:
    """One `--host` as a SAN: an address, or a DNS name that may begin with `*.`.

    Raises:
        SecurityRefused: neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        name = text.removesuffix(".")
    labels = name.removeprefix("*.").split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise SecurityRefused(
            f"--host {text!r} is neither an address nor a DNS name (letters, digits, '-' and '.')"
        )
    return x509.DNSName(name)


def write_private(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write new files of mode 0600, all or none, never over an existing one.

    Each is written and synced under a temporary name and then linked to its own name, which fails
    where a rename would overwrite.

    Raises:
        SecurityRefused: one of them is there already.
        OSError: the disk refuses.
    """
    for name in files:
        if os.path.lexists(directory / name):
            raise SecurityRefused(
                f"{directory / name} is there already and is never overwritten; "
                "move it away or choose another directory"
            )
    made: list[Path] = []
    try:
        for name, content in files.items():
            _write_new(directory / name, content)
            made.append(directory / name)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_new(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        raise SecurityRefused(f"{path} is there already and is never overwritten") from None
    finally:
        temporary.unlink(missing_ok=True)


def create_all(directory: Path, learners: int, hosts: Sequence[str], now: datetime) -> list[str]:
    """`keys init`: everything for one syncer and `learners` learners, ids from 0.

    Returns:
        the names of the files written.

    Raises:
        SecurityRefused: a file is there already, or a host is no name.
        OSError: the disk refuses.
    """
    names = [server_name(host) for host in dict.fromkeys(hosts)]
    _private_directory(directory)
    authority = Authority.create(now)
    files = {
        "ca.pem": authority.certificate.public_bytes(serialization.Encoding.PEM),
        "ca-key.pem": _key_pem(authority.key),
        AUTH_KEY_FILE: secrets.token_hex(32).encode() + b"\n",
    }
    pair = authority.issue(hosts[0], names, ExtendedKeyUsageOID.SERVER_AUTH, now)
    files["server.pem"], files["server-key.pem"] = pair
    for learner_id in range(learners):
        files |= _learner_files(authority, learner_id, now)
    write_private(directory, files)
    return list(files)


def create_learner(directory: Path, learner_id: int, now: datetime) -> list[str]:
    """`keys add-learner`: one more certificate of the directory's CA; names as `create_all`."""
    files = _learner_files(Authority.load(directory), learner_id, now)
    write_private(directory, files)
    return list(files)


def _learner_files(authority: Authority, learner_id: int, now: datetime) -> dict[str, bytes]:
    uri = x509.UniformResourceIdentifier(f"{LEARNER_URI}{learner_id}")
    name, usage = f"yeto learner {learner_id}", ExtendedKeyUsageOID.CLIENT_AUTH
    certificate, key = authority.issue(name, [uri], usage, now)
    stem = f"learner-{learner_id}"
    return {f"{stem}.pem": certificate, f"{stem}-key.pem": key}


def _private_directory(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise SecurityRefused(f"{directory} is not a directory") from None
    directory.chmod(0o700)


def describe(directory: Path, now: datetime) -> list[str]:
    """`keys show`: one line per certificate with subject, SANs and expiry; nothing secret.

    Raises:
        SecurityRefused: no certificates there, or one cannot be read.
    """
    try:
        found = [name for name in os.listdir(directory) if _CERTIFICATE_NAME.fullmatch(name)]
    except OSError as error:
        raise SecurityRefused(f"{directory} cannot be read: {error.strerror}") from None
    if not found:
        raise SecurityRefused(f"{directory} holds no certificates; `keys init` makes them")
    found.sort(key=lambda name: (name.startswith("learner"), len(name), name))
    return [_line(name, _read_certificate(directory / name), now) for name in found]


def _line(name: str, certificate: x509.Certificate, now: datetime) -> str:
    expiry = certificate.not_valid_after_utc
    state = "EXPIRED" if expiry <= now else "expires"
    alternatives = ", ".join(_alternatives(certificate)) or "-"
    subject = certificate.subject.rfc4514_string()
    return f"{name}  {subject}  SAN {alternatives}  {state} {expiry:%Y-%m-%d %H:%M} UTC"


def _alternatives(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    kinds: dict[type[x509.GeneralName], str] = {
        x509.DNSName: "DNS",
        x509.IPAddress: "IP",
        x509.UniformResourceIdentifier: "URI",
    }
    return [f"{kinds.get(type(item), 'other')}:{item.value}" for item in extension.value]


class _Refused(click.ClickException):
    """A refusal in one line, exit 2."""

    exit_code = 2


_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def keys() -> None:
    """Make and show the keys and certificates of a run."""


@keys.command("init")
@_DIRECTORY
@click.option(
    "--learners",
    type=Whole(0, MAX_LEARNERS),
    default=0,
    show_default=True,
    help="Make certificates for the learner ids 0..N-1.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    default=DEFAULT_HOSTS,
    show_default=True,
    help="A name or address of the syncer, as learners dial it; may be repeated.",
)
def init_command(directory: Path, learners: int, hosts: tuple[str, ...]) -> None:
    """Create a CA, a server certificate, learner certificates and a shared key in DIR."""
    _report(directory, _guarded(lambda: create_all(directory, learners, hosts, _now())))
    click.echo(
        f"Syncer:  --tls-cert {directory}/server.pem --tls-key {directory}/server-key.pem "
        f"--tls-client-ca {directory}/ca.pem\n"
        f"Learner: --tls-ca ca.pem --tls-cert learner-<id>.pem --tls-key learner-<id>-key.pem\n"
        f"Or, without TLS, on both sides: --auth-key-file {directory}/{AUTH_KEY_FILE}\n"
        "Keep ca-key.pem away from the machines that train."
    )


@keys.command("add-learner")
@_DIRECTORY
@click.argument("learner_id", metavar="ID", type=Whole(0, U32_MAX))
def add_learner_command(directory: Path, learner_id: int) -> None:
    """Sign one more learner certificate, bound to ID."""
    _report(directory, _guarded(lambda: create_learner(directory, learner_id, _now())))


@keys.command("show")
@_DIRECTORY
def show_command(directory: Path) -> None:
    """List the certificates in DIR: subjects, names and expiry; nothing secret."""
    for line in _guarded(lambda: describe(directory, _now())):
        click.echo(line)


def _guarded(work: Callable[[], list[str]]) -> list[str]:
    """Run `work`; a refusal ends the program with exit 2, a failing disk with exit 1."""
    try:
        return work()
    except SecurityRefused as error:
        raise _Refused(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None


def _report(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        click.echo(f"wrote {directory / name}")


def _now() -> datetime:
    return datetime.now(UTC)
