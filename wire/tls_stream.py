"""TLS over any asyncio transport, as a layer between the socket and a BufferedProtocol.

asyncio's own layer drops the alert of a failed handshake, hides the failure from the protocol and
cannot half-close. This one sends the alert, so that the other side learns the reason (S13), reports
every failure, counts from the first byte, supports `write_eof` (W38) and decrypts straight into the
buffers that the protocol above asks for.

    socket <-> lower transport <-> TlsEndpoint <-> protocol above (through TlsTransport)
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from wire.errors import ErrorCode, LocalError, ProtocolError
from wire.frames import MAGIC, Role
from wire.messages import Buffer, ErrorMessage, encode_frame
from wire.security import SecurityRefused
from wire.tls import (
    CUT_OFF,
    NOT_TLS,
    PLAIN_BYTES,
    PeerCertificate,
    TlsProblem,
    explain,
    looks_like_tls,
)
from wire.tls_transport import TlsTransport

READ_BYTES = 65_536
"""Ciphertext taken from the socket at once; bounds what a paused socket holds (plus a record)."""
FLUSH_BYTES = 262_144
"""Ciphertext handed to the socket's transport at once."""
LINGER_S = 1.0
"""After an alert, input is discarded so long that a reset does not swallow it (as W38)."""

_MAGIC_BYTE = MAGIC & 0xFF
_SPEAK_TLS = ProtocolError(ErrorCode.AUTH, "this port speaks TLS; give --tls-ca")


class TlsFailure(ConnectionError):
    """A connection that TLS ended; `problem.fatal` says whether a redial is in vain."""

    def __init__(self, problem: TlsProblem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


class TlsDoor:
    """Everything that the TLS connections of one program on one event loop share.

    Args:
        role: SYNCER accepts, LEARNER dials.
        context: called for every connection, so that a reloaded context is used at once (S14).
        server_name: the name that the syncer's certificate must hold; learner only.

    Raises:
        SecurityRefused: `server_name` can be no name.
    """

    def __init__(
        self,
        role: Role,
        context: Callable[[], ssl.SSLContext],
        server_name: str | None = None,
    ) -> None:
        self.role = role
        self._context = context
        self._server_name = server_name
        # Filled and emptied within one callback of the loop, so all connections can share it.
        self.scratch = memoryview(bytearray(READ_BYTES))
        try:
            self.session(ssl.MemoryBIO(), ssl.MemoryBIO())
        except ValueError:
            raise SecurityRefused(f"{server_name!r} is no name of a TLS server") from None

    def session(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """The TLS state of one new connection."""
        server = self.role is Role.SYNCER
        return self._context().wrap_bio(
            incoming, outgoing, server_side=server, server_hostname=self._server_name
        )

    def wrap(
        self, app: asyncio.BufferedProtocol, on_failure: Callable[[TlsProblem], None]
    ) -> TlsEndpoint:
        """The protocol to give to `create_server` or `create_connection` in place of `app`."""
        return TlsEndpoint(self, app, on_failure)


async def connect(
    door: TlsDoor, app: asyncio.BufferedProtocol, host: str, port: int
) -> asyncio.Transport:
    """Dial, shake hands, and return the transport that `app` got.

    The syncer judges our certificate only after our side is done: its refusal arrives later, as
    the TlsFailure in `app.connection_lost`.

    Raises:
        TlsFailure: the handshake failed.
        OSError: no connection.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[asyncio.Transport] = loop.create_future()

    def fail(problem: TlsProblem) -> None:
        if not ended.done():
            ended.set_exception(TlsFailure(problem))

    def succeed(transport: asyncio.Transport) -> None:
        if not ended.done():
            ended.set_result(transport)

    endpoint = door.wrap(app, fail)
    endpoint.on_ready = succeed
    await loop.create_connection(lambda: endpoint, host, port)
    try:
        return await ended
    except asyncio.CancelledError:
        endpoint.abort()
        raise


class TlsEndpoint(asyncio.BufferedProtocol):
    """One TLS connection. `app` sees `connection_made` only after the handshake.

    Either `app.connection_lost` or `on_failure` is called, once, when the socket is gone: the
    owner of a limit on sockets counts from the making of this object to then (S13). A handshake
    timeout is the owner's; it calls `abort`.

    Attributes:
        address: the other end, for the log; "?" before there is a socket.
        peer: the client's certificate, syncer only (S12).
        problem: what ended the connection, if TLS did.
    """

    def __init__(
        self,
        door: TlsDoor,
        app: asyncio.BufferedProtocol,
        on_failure: Callable[[TlsProblem], None],
    ) -> None:
        self.app = app
        self.address = "?"
        self.on_ready: Callable[[asyncio.Transport], None] | None = None
        self.peer: PeerCertificate | None = None
        self.problem: TlsProblem | None = None
        self._door = door
        self._on_failure = on_failure
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.ssl = door.session(self._incoming, self._outgoing)
        self.lower: asyncio.Transport | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._first = True
        self._open = False
        self._paused = False
        self._draining = False
        self._deaf = False

    # The lower transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake; the learner speaks first."""
        self.lower = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):  # a text for unix sockets
            self.address = f"{name[0]}:{name[1]}"
        if self._door.role is Role.LEARNER:
            self._handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Room for ciphertext."""
        return self._door.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Ciphertext arrived: go on with the handshake, or decrypt for the protocol above."""
        if self._deaf:
            return
        data = self._door.scratch[:nbytes]
        if self._first:
            self._first = False
            if not looks_like_tls(data):
                self._refuse_plain(data[0])
                return
        self._incoming.write(data)
        if self._open:
            self.drain()
        else:
            self._handshake()

    def eof_received(self) -> bool:
        """The other side is done sending; True keeps the socket, this layer closes it."""
        if not self._open:
            self.socket_transport.close()
        elif not self._deaf:
            self._incoming.write_eof()
            self.drain()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the one who waits."""
        self._deaf = True
        if self._linger is not None:
            self._linger.cancel()
        if self._open:
            self.app.connection_lost(TlsFailure(self.problem) if self.problem else exc)
        else:
            self._on_failure(self.problem or CUT_OFF)

    def pause_writing(self) -> None:
        """The socket's queue is above its mark."""
        if self._open:
            self.app.pause_writing()

    def resume_writing(self) -> None:
        """The socket's queue is below its mark again."""
        if self._open:
            self.app.resume_writing()

    def abort(self) -> None:
        """Close the socket at once, in any state."""
        self._deaf = True
        if self.lower is not None:
            self.lower.abort()

    # Handshake.

    @property
    def socket_transport(self) -> asyncio.Transport:
        """The transport below."""
        if self.lower is None:
            raise LocalError("this TLS connection has no socket yet")
        return self.lower

    def _handshake(self) -> None:
        try:
            self.ssl.do_handshake()
            certificate = self.ssl.getpeercert(binary_form=True)
            if certificate is not None and self._door.role is Role.SYNCER:
                self.peer = PeerCertificate.of(certificate)
        except ssl.SSLWantReadError:
            self.flush()
            return
        except ssl.SSLEOFError:
            self._fail(CUT_OFF)
            return
        except ssl.SSLError as error:
            self._fail(explain(error, self._door.role))
            return
        except ProtocolError as error:
            self._fail(TlsProblem(error.sentence, fatal=True))
            return
        self.flush()
        self._open = True
        transport = TlsTransport(self)
        self.app.connection_made(transport)
        if self.on_ready is not None:
            self.on_ready(transport)
        self.drain()

    def _refuse_plain(self, first: int) -> None:
        if self._door.role is Role.LEARNER:
            self._fail(NOT_TLS)
            return
        if first == _MAGIC_BYTE:
            self.socket_transport.write(encode_frame(ErrorMessage(_SPEAK_TLS.text)))
        self._fail(PLAIN_BYTES)

    def _fail(self, problem: TlsProblem) -> None:
        """Send what is queued (the alert), then discard input until EOF or the linger time."""
        self.problem = problem
        self._deaf = True
        self.flush()
        if self._door.role is Role.LEARNER:
            self.socket_transport.close()
            return
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, self.socket_transport.abort)
        with suppress(OSError):  # the other side may be gone already
            self.socket_transport.write_eof()

    # Between the handshake and the end; called by TlsTransport too.

    def drain(self) -> None:
        """Decrypt what is there into the buffers of the protocol above, unless it has paused."""
        if self._draining:
            return
        self._draining = True
        try:
            ended = False
            while not (ended or self._paused or self._deaf):
                ended = self._decrypt_once()
        finally:
            self._draining = False
        if self._outgoing.pending:  # the answer to a key update
            self.flush()

    def _decrypt_once(self) -> bool:
        """Fill one buffer; True when there is nothing more to read now."""
        view = memoryview(self.app.get_buffer(-1)).cast("B")
        if not view:
            raise LocalError("the protocol above TLS offers an empty buffer")
        filled, ended, eof = 0, False, False
        try:
            while filled < len(view) and not eof:
                # The stub says bytes for both forms; with a buffer it is the count.
                got = cast(int, self.ssl.read(len(view) - filled, view[filled:]))
                eof = got == 0
                filled += got
        except ssl.SSLWantReadError:
            ended = True
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            eof = True
        except ssl.SSLError as error:
            self.problem = explain(error, self._door.role)
        if filled:
            self.app.buffer_updated(filled)
        if self.problem is not None:
            self._deaf = True
            self.flush()
            self.socket_transport.close()
        elif eof and not self._deaf:
            self._deaf = True
            if not self.app.eof_received():
                self.socket_transport.close()
        return ended

    def encrypt(self, data: Buffer) -> None:
        """Queue plaintext as records; large data goes on to the socket piece by piece."""
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self.ssl.write(view) :]  # one record of at most 16 KiB per call
            if self._outgoing.pending >= FLUSH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Hand queued ciphertext to the socket's transport."""
        if self._outgoing.pending and self.lower is not None:
            self.lower.write(self._outgoing.read())

    def say_goodbye(self) -> None:
        """Queue and flush a close_notify."""
        with suppress(ssl.SSLError):  # wants the other side's close_notify, which may never come
            self.ssl.unwrap()
        self.flush()

    def pause(self) -> None:
        """Stop reading; bytes already taken from the socket wait here."""
        self._paused = True
        if not self.socket_transport.is_closing():
            self.socket_transport.pause_reading()

    def resume(self) -> None:
        """Read again, beginning with the bytes that wait here."""
        if not self._paused:
            return
        self._paused = False
        if not self.socket_transport.is_closing():
            self.socket_transport.resume_reading()
        asyncio.get_running_loop().call_soon(self.drain)

    @property
    def paused(self) -> bool:
        """Whether the protocol above has paused reading."""
        return self._paused

    def close(self) -> None:
        """Send what is queued, then close; nothing more is delivered."""
        if not self.socket_transport.is_closing():
            self.say_goodbye()
            self.socket_transport.close()
        self._deaf = True
