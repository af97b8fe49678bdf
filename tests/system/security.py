"""Clients with keys and certificates, and the files they need."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.system.client import Client, frame
from wire.authority import Authority
from wire.messages import Hello, Message, encode_hello
from wire.security import AuthKey, seal


def key_file(directory: Path, name: str = "auth.key", byte: int = 0x5A) -> Path:
    """A private key file with a key of 32 equal bytes."""
    path = directory / name
    path.write_text(bytes([byte] * 32).hex() + "\n")
    path.chmod(0o600)
    return path


def key_of(path: Path) -> AuthKey:
    """The key in a key file."""
    return AuthKey(bytes.fromhex(path.read_text()))


def private(path: Path, content: bytes) -> Path:
    """Write a file that only its owner may read."""
    path.write_bytes(content)
    path.chmod(0o600)
    return path


class Certificates:
    """A CA in a directory, and what it has signed."""

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.authority = authority or Authority.create(datetime.now(UTC))
        self.ca = private(directory / "ca.pem", self.authority.certificate_pem())

    def server(self, name: str = "server", host: str = "127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key for the syncer."""
        return self._files(name, self.authority.issue_server([host], datetime.now(UTC)))

    def learner(
        self, learner_id: int, now: datetime | None = None, name: str | None = None
    ) -> tuple[Path, Path]:
        """Certificate and key for one learner id, issued `now`."""
        made = self.authority.issue_learner(learner_id, now or datetime.now(UTC))
        return self._files(name or f"learner-{learner_id}", made)

    def _files(self, stem: str, made: tuple[bytes, bytes]) -> tuple[Path, Path]:
        certificate = private(self.directory / f"{stem}.pem", made[0])
        return certificate, private(self.directory / f"{stem}-key.pem", made[1])

    def syncer_flags(self) -> tuple[str, ...]:
        """Options of a syncer that requires certificates of this CA."""
        certificate, key = self.server()
        return (
            *("--tls-cert", str(certificate), "--tls-key", str(key)),
            *("--tls-client-ca", str(self.ca)),
        )

    def context(self, learner: tuple[Path, Path] | None) -> ssl.SSLContext:
        """What a client of this CA connects with, with or without its own certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        if learner is not None:
            context.load_cert_chain(*learner)
        return context


class SafeClient(Client):
    """A scripted client that seals its HELLO, or speaks TLS, or both."""

    def __init__(
        self,
        port: int,
        learner_id: int = 0,
        *,
        key: AuthKey | None = None,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.key = key
        self.tls = tls
        self.hello_frame = b""
        super().__init__(port, learner_id, **options)

    def send(self, message: Message) -> None:
        if isinstance(message, Hello):
            body = encode_hello(message)
            self.hello_frame = frame(1, body if self.key is None else seal(self.key, body))
            self.control.sendall(self.hello_frame)
        else:
            super().send(message)

    def _connect(self) -> Any:
        sock = super()._connect()
        if self.tls is None:
            return sock
        safe = self.tls.wrap_socket(sock, server_hostname="127.0.0.1")
        self._buffers[safe] = self._buffers.pop(sock)
        return safe

    def feed(self, sock: Any) -> Iterator[Message]:
        yield from super().feed(sock)
        while isinstance(sock, ssl.SSLSocket) and self.ended is None and sock.pending():
            yield from super().feed(sock)


def refusal_of(connect: Any) -> str:
    """What a client gets that is not let in: the text of an ERROR, "eof", or the TLS reason."""
    with contextlib.ExitStack() as closing:
        try:
            client = connect()
            closing.callback(client.close)
            return str(client.until_end())
        except ssl.SSLError as error:
            return str(error.reason)
