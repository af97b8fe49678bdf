"""How a learner's sockets are protected (S5, S11, S21)."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from learner import Learner, LearnerConfig
from learner.errors import ConfigError
from learner.options import learner_options, read_options
from learner.protection import open_transport
from tests.system.security import Certificates, key_file, key_of
from wire.errors import one_line, readable
from wire.security import seal

FOREIGN = "syncer.example:29400"


def transport(connect: str = "127.0.0.1:1", environ: dict[str, str] | None = None, **kw: Any):
    return open_transport(LearnerConfig(connect=connect, **kw), environ or {})


def sealer(path: Path) -> object:
    return partial(seal, key_of(path))(b"hello")


@pytest.mark.parametrize("connect", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_loopback_needs_nothing(connect: str) -> None:
    found = transport(connect)
    assert (found.ssl, found.seal) == (None, None)


def test_a_baseline_reads_nothing() -> None:
    transport("none", auth_key_file="missing", tls_ca="missing")


def test_the_key_comes_from_the_settings_or_else_from_the_environment(tmp_path: Path) -> None:
    one, two = key_file(tmp_path, "a", 1), key_file(tmp_path, "b", 2)
    environ = {"YETO_AUTH_KEY_FILE": str(two)}
    for found, path in (
        (transport(FOREIGN, environ, auth_key_file=one), one),
        (transport(FOREIGN, environ), two),
    ):
        assert found.seal is not None
        assert found.seal(b"hello") == sealer(path)
        assert key_of(path).secret.hex() not in repr(found)


@pytest.mark.parametrize(
    "host", ["syncer.example", "10.0.0.1", "[2001:db8::1]", "127.0.0.1.example"]
)
def test_the_model_does_not_leave_unprotected(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """S21: each way out is named, and `--insecure` is one that says so."""
    with pytest.raises(ConfigError, match=r"--auth-key-file.*--tls-ca.*--insecure"):
        transport(f"{host}:1")
    caplog.set_level(logging.WARNING)
    assert transport(f"{host}:1", insecure=True).seal is None
    assert "without key and encryption" in caplog.text


def test_tls_names_the_host_unless_told_otherwise(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.learner(0)
    found = transport(FOREIGN, tls_ca=certificates.ca, tls_cert=cert, tls_key=key)
    assert found.ssl is not None
    assert found.server_name == "syncer.example"
    assert transport(FOREIGN, tls_ca=certificates.ca, tls_server_name="x").server_name == "x"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"auth_key_file": "missing"}, "missing"),
        ({"tls_cert": "c", "tls_key": "k"}, "--tls-ca"),
        ({"tls_server_name": "x"}, "--tls-ca"),
        ({"tls_ca": "ca", "tls_cert": "c"}, "go together"),
        ({"tls_ca": "missing"}, "missing"),
    ],
)
def test_what_cannot_be_used_is_refused(settings: dict[str, str], reason: str) -> None:
    """Exit 2: each is a ConfigError in one line."""
    with pytest.raises(ConfigError, match=reason) as caught:
        transport(**settings)
    assert caught.value.exit_code == 2
    assert str(caught.value).isprintable()


def test_the_command_line_uses_the_first_key_and_reads_toml(tmp_path: Path) -> None:
    """S5; the other options come from a file here."""

    @click.command()
    @learner_options
    def program(**values: object) -> None:
        config = read_options(values).config
        assert str(config.auth_key_file) == "one"
        assert [str(v) for v in (config.tls_ca, config.tls_cert, config.tls_key)] == list("abc")
        assert (config.tls_server_name, config.insecure) == ("name", True)

    path = tmp_path / "learner.toml"
    path.write_text(
        'tls-ca = "a"\ntls_cert = "b"\ntls-key = "c"\n'
        '[learner]\ntls-server-name = "name"\ninsecure = true\nauth-key-file = ["zero"]\n'
    )
    keys = ("--auth-key-file=one", "--auth-key-file", "two")
    flags = ["--connect=none", f"--config={path}", *keys]
    result = CliRunner().invoke(program, flags, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_library_refuses_as_the_program_does() -> None:
    """S21 holds for `Learner` too, before it starts any thread."""
    with pytest.raises(ConfigError, match="--insecure"):
        Learner(torch.nn.Linear(2, 2), LearnerConfig(connect=FOREIGN))


def test_texts_of_others_are_shown_escaped_and_short() -> None:
    """W41: terminal sequences, line ends and direction marks do nothing here."""
    assert one_line("Grüße, 世界") == "Grüße, 世界"
    assert one_line("a\x1b[2J\r\n\u202eb\x9b\ud800") == r"a\x1b[2J\r\n\u202eb\x9b\ud800"
    assert len(readable("x" * 70_000)) == 1024
