"""What stands between the port and strangers (S4, S5, S11, S20)."""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncer.door import LayoutMemo, warn_of_exposure
from syncer.protection import Protection, protect
from tests.syncer.shell.fakes import LAYOUT, Bench, FakeGroup, FakeNewcomer, hello
from tests.system.security import Certificates, key_file, key_of
from wire.errors import ProtocolError
from wire.layout import NumericLayout, parse_layout
from wire.messages import Hello
from wire.security import SecurityRefused

from .parsing import parse, program


def protection(*arguments: str, **environ: str) -> Protection:
    return protect(parse(*arguments), environ)


def test_nothing_is_needed_on_loopback() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        found = protection("--host", host)
        assert found == Protection()
        assert not found.closed


def test_keys_come_from_the_options_or_else_from_the_environment(tmp_path: Path) -> None:
    one, two, env = (key_file(tmp_path, name, byte) for byte, name in enumerate("abc"))
    given = ("--auth-key-file", str(one), f"--auth-key-file={two}")
    assert protection(*given, YETO_AUTH_KEY_FILE=str(env)).keys == (key_of(one), key_of(two))
    found = protection(YETO_AUTH_KEY_FILE=str(env))
    assert found.keys == (key_of(env),)
    assert found.closed
    assert protection("--host=0.0.0.0", YETO_AUTH_KEY_FILE=str(env)).exposed is None
    with pytest.raises(SecurityRefused, match="missing"):
        protection("--auth-key-file=missing", YETO_AUTH_KEY_FILE=str(env))


@pytest.mark.parametrize("value", ['["{0}", "{1}"]', '"{0}"'])
def test_key_files_in_a_configuration_file(tmp_path: Path, value: str) -> None:
    one, two = key_file(tmp_path, "a", 1), key_file(tmp_path, "b", 2)
    config = tmp_path / "c.toml"
    config.write_text(f"[syncer]\nauth_key_file = {value.format(one, two)}\ninsecure = true\n")
    options = parse("--config", str(config))
    assert options.auth_key_file == ((str(one), str(two)) if "[" in value else (str(one),))
    assert options.insecure
    config.write_text("auth-key-file = [1]\n")
    result = CliRunner().invoke(program, ("--config", str(config)), obj=[])
    assert result.exit_code == 2
    assert "a string" in result.stderr


def test_only_a_client_ca_closes_a_tls_port(tmp_path: Path) -> None:
    """S20: TLS alone lets everybody in."""
    certificates = Certificates(tmp_path)
    flags = certificates.syncer_flags()
    assert protection("--host=0.0.0.0", *flags).closed
    assert not protection(*flags[:4]).closed
    with pytest.raises(SecurityRefused, match=r"--auth-key-file.*--tls-client-ca.*--insecure"):
        protection("--host=0.0.0.0", *flags[:4])


def test_insecure_is_repeated_where_it_matters_and_named_where_it_does_not(
    tmp_path: Path,
) -> None:
    exposed = protection("--host=0.0.0.0", "--insecure")
    assert exposed.exposed is not None
    assert exposed.warnings == ()
    for flags in ((), ("--host=0.0.0.0", "--auth-key-file", str(key_file(tmp_path)))):
        found = protection(*flags, "--insecure")
        assert found.exposed is None
        assert "no effect" in found.warnings[0]


async def test_the_warning_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """S20: at start and every hour."""
    caplog.set_level(logging.WARNING)
    warn_of_exposure(Protection(), every=0.001)
    assert not caplog.records
    warn_of_exposure(Protection(exposed="anyone may join"), every=0.001)
    assert len(caplog.records) == 1
    async with asyncio.timeout(10):
        while len(caplog.records) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert {record.message for record in caplog.records} == {"anyone may join"}


@pytest.mark.parametrize("flag", ["--auth-key-file", "--tls-cert", "--tls-key", "--tls-client-ca"])
def test_what_is_read_is_never_written_to(tmp_path: Path, flag: str) -> None:
    tape = str(tmp_path / "tape")
    for arguments, reason in (
        ((flag, tape, "--event-tape", tape), "collides with --event-tape"),
        ((flag, ""), "a file name"),
        ((flag, "a\0b"), "without NUL"),
    ):
        result = CliRunner().invoke(program, arguments, obj=[])
        assert result.exit_code == 2
        assert reason in result.stderr
    parse("--tls-cert", tape, "--tls-key", tape)  # one file may hold both


def test_the_options_are_no_profile_fields(tmp_path: Path) -> None:
    """W22: two syncers may differ in their protection."""
    plain = parse().profile.digest()
    flags = ("--auth-key-file=k", "--tls-cert=c", "--tls-key=d", "--tls-client-ca=e", "--insecure")
    assert parse(*flags).profile.digest() == plain


def raw(*numels: int) -> bytes:
    return b"".join(struct.pack("<BIQ", 0, 1, numel) for numel in numels)


def test_a_known_layout_is_not_read_again() -> None:
    """And only exactly that one: count, bytes and what follows are looked at each time."""
    read = LayoutMemo()
    tail = bytes(66)
    first, used = read(memoryview(raw(3, 4) + tail), 2)
    assert used == len(raw(3, 4))
    again, _ = read(memoryview(raw(3, 4) + bytes(98)), 2)
    assert again is first
    for data, count in (
        (raw(3, 5) + tail, 2),
        (raw(3, 4, 5) + tail, 3),
        (raw(3, 4) + tail, 1),
        (raw(3) + tail, 1),
    ):
        assert read(memoryview(data), count) == parse_layout(memoryview(data), count)
    for data, count in ((raw(3, 4)[:-1], 2), (raw(3, 0), 2), (b"", 1)):
        with pytest.raises(ProtocolError):
            read(memoryview(data), count)
    assert read(memoryview(raw(3) + tail), 1)[0] == parse_layout(memoryview(raw(3)), 1)[0]


class Recorder(FakeNewcomer):
    """Notes the HELLO that is adopted."""

    adopted: Hello | None = None

    def adopt(self, hello: Hello, sink: object) -> FakeGroup:
        self.adopted = hello
        return super().adopt(hello, sink)


async def test_learners_of_a_run_share_one_layout() -> None:
    """However many read it anew: it may be large."""
    bench = Bench()
    layouts = []
    for number in range(2):
        newcomer = Recorder()
        own = NumericLayout(tuple(LAYOUT.fragments))
        bench.actor.hello(newcomer, replace(hello(number), layout=own))  # type: ignore[arg-type]
        assert newcomer.adopted is not None
        layouts.append(newcomer.adopted.layout)
    assert layouts[0] is layouts[1]
    bench.workers.shutdown()
