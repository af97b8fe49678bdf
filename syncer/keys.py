"""`yeto-syncer keys`: a private CA, certificates and a shared key in one directory (S30).

| file | content |
|---|---|
| ca.pem, ca-key.pem | the private CA, 10 years |
| server.pem, server-key.pem | the syncer's certificate, 1 year |
| learner-<id>.pem, learner-<id>-key.pem | a learner's, bound to its id by a SAN URI (S12), 1 year |
| auth.key | the shared key that seals HELLO (S5) |
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from wire.authority import Authority, describe
from wire.cli_support import U32_MAX, Whole
from wire.security import SecurityRefused, read_private

AUTH_KEY_FILE = "auth.key"
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_LEARNERS = 4096
"""Certificates that one `keys init` makes at most."""

_PEM_LIMIT = 1_048_576
_CERTIFICATE_NAME = re.compile(r"ca\.pem|server\.pem|learner-[0-9]+\.pem")


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
    authority = Authority.create(now)
    server, server_key = authority.issue_server(hosts, now)
    files = {
        "ca.pem": authority.certificate_pem(),
        "ca-key.pem": authority.key_pem(),
        "server.pem": server,
        "server-key.pem": server_key,
        AUTH_KEY_FILE: secrets.token_hex(32).encode() + b"\n",
    }
    for learner_id in range(learners):
        files |= _learner_files(authority, learner_id, now)
    _private_directory(directory)
    write_private(directory, files)
    return list(files)


def create_learner(directory: Path, learner_id: int, now: datetime) -> list[str]:
    """`keys add-learner`: one more certificate of the directory's CA; names as `create_all`."""
    authority = load_authority(directory)
    files = _learner_files(authority, learner_id, now)
    write_private(directory, files)
    return list(files)


def _learner_files(authority: Authority, learner_id: int, now: datetime) -> dict[str, bytes]:
    certificate, key = authority.issue_learner(learner_id, now)
    stem = f"learner-{learner_id}"
    return {f"{stem}.pem": certificate, f"{stem}-key.pem": key}


def load_authority(directory: Path) -> Authority:
    """The CA of a directory.

    Raises:
        SecurityRefused: a file is missing, not private, malformed, or they do not belong together.
    """
    key = read_private(directory / "ca-key.pem", "CA key", _PEM_LIMIT)
    return Authority.load(_read(directory / "ca.pem"), key)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SecurityRefused(f"certificate {path} cannot be read: {error.strerror}") from None


def _private_directory(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise SecurityRefused(f"{directory} is not a directory") from None
    directory.chmod(0o700)


def list_certificates(directory: Path, now: datetime) -> list[str]:
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
    paths = [directory / name for name in found]
    return [f"{path.name}  {describe(_read(path), str(path), now)}" for path in paths]


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
    for line in _guarded(lambda: list_certificates(directory, _now())):
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
