"""The asyncio shell around one socket's protocol core (house.md, W4, W38, W47).

A `BufferedProtocol`: the transport reads straight into the buffer that the core names, which for a
bulk slice is its final place in the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from wire.connection import Core
from wire.direct import DirectWriter
from wire.errors import ProtocolError
from wire.messages import Buffer

KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_COUNT = 6
BATCH_BYTES = 16 * 1024
"""Output that is collected before it is written; less is written by `flush`."""
NOTSENT_LOWAT = 256 * 1024
"""Unsent bytes that the kernel takes of the control socket, so that PULLs stay withdrawable."""
LOW_WATER = 1024 * 1024
"""Bytes of an announced body that the kernel gathers before it wakes us, where it can."""
LOCAL_SEND_BYTES = 512 * 1024
"""Output that the kernel holds of a socket to the same machine. Bytes that are read soon after they
were written are still in the processor's cache: moving them then takes a quarter less time. To
other machines the kernel itself finds how much the line holds."""
_GATHERS = sys.platform == "linux"


class StreamOwner(Protocol):
    """Who is told what happens on a stream: a newcomer before its first frame, then a group."""

    def on_connected(self, stream: Stream) -> None:
        """The transport is there."""

    def on_bytes(self, stream: Stream) -> None:
        """The core may have events."""

    def on_fault(self, stream: Stream, error: ProtocolError) -> None:
        """The core refused what came; reading is paused."""

    def on_drained(self, stream: Stream) -> None:
        """All that was written is in the kernel."""

    def on_ended(self, stream: Stream, error: Exception | None) -> None:
        """EOF (None), or the connection is lost. May be called for both, in that order."""


class Stream(asyncio.BufferedProtocol):
    """One socket.

    Attributes:
        core: where arriving bytes go; replaced when the socket joins a group.
        owner: likewise.
        busy: something written is not in the kernel yet; nothing more should be written (W47).
        bytes_in: bytes received.
        bytes_out: bytes written.
        last_read: loop time of the last byte received.
        lost: the socket is closed.
        peer: address and port of the other end.
        progressed: loop time of the last write, or of the last time the kernel took something.
    """

    def __init__(
        self,
        core: Core,
        owner: StreamOwner,
        stall: float,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.core = core
        self.owner = owner
        self.busy = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.last_read = 0.0
        self.progressed = 0.0
        self.lost = False
        self.peer = "?"
        self._stall = stall
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._gatherer: socket.socket | None = None
        self._direct: DirectWriter | None = None
        self._low_water = 1
        self._reading = True
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._unsent_before = 0
        self._lingering = False
        self._after_linger: Callable[[], None] | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    # -- asyncio's side ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected (and, under TLS, trusted)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=0)
        self.last_read = self.progressed = self._loop.time()
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # reset while we set it up: the read will tell
                _set_options(sock, self._stall)
            if _GATHERS and transport.get_extra_info("ssl_object") is None:
                self._gatherer = sock
        name = transport.get_extra_info("peername")
        if name:
            self.peer = f"{name[0]}:{name[1]}"
            local = transport.get_extra_info("sockname")
            if sock is not None and local and local[0] == name[0]:
                with contextlib.suppress(OSError):  # merely slower
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)
        self.owner.on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport reads to."""
        return self.core.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """The transport has read."""
        self.bytes_in += nbytes
        self.last_read = self._loop.time()
        try:
            ready = self.core.buffer_updated(nbytes)
        except ProtocolError as error:
            self.pause_reading()
            self.owner.on_fault(self, error)
            return
        if ready:
            self.owner.on_bytes(self)
        expected = self.core.expected
        if expected or self._low_water > 1:
            self._gather(min(expected, LOW_WATER) or 1)

    def eof_received(self) -> bool:
        """The peer has finished sending; we decide when to close."""
        self._ended(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self.lost = True
        self.busy = False
        self._gatherer = None
        self._close_direct()
        if self._on_lost is not None:
            self._on_lost()
        self._ended(exc)

    def pause_writing(self) -> None:
        """The kernel did not take everything."""
        self.busy = True
        self.progressed = self._loop.time()
        self._unsent_before = self.unsent

    def resume_writing(self) -> None:
        """The kernel has everything."""
        self.busy = False
        self.owner.on_drained(self)

    # -- the owner's side --------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes written, or put, that the kernel has not taken."""
        transport = self._transport
        if transport is None or self.lost:
            return 0
        direct = self._direct.unsent if self._direct is not None else 0
        return self._pending_bytes + transport.get_write_buffer_size() + direct

    @property
    def transport(self) -> asyncio.Transport:
        """The transport of a connected stream."""
        if self._transport is None:
            raise ValueError("the stream is not connected")
        return self._transport

    def put(self, parts: Iterable[Buffer]) -> None:
        """Send bytes-like objects in order, without joining them, at the latest with `flush`.

        Short ones wait for each other, so that many frames cost one system call. `busy` says
        afterwards whether the kernel took what had to go out.
        """
        for part in parts:
            self._pending.append(part)
            self._pending_bytes += len(part)
        if self._pending_bytes >= BATCH_BYTES:
            self.flush()

    def send(self, frame: bytes) -> None:
        """Send a short frame now, after what `put` left."""
        if self._pending:
            self.put((frame,))
            self.flush()
        elif not (self.lost or self._transport is None or self._transport.is_closing()):
            self.bytes_out += len(frame)
            self._transport.write(frame)

    def flush(self) -> None:
        """Send what `put` left."""
        if not self._pending:
            return
        parts, self._pending = self._pending, []
        size, self._pending_bytes = self._pending_bytes, 0
        if self.lost or self._transport is None or self._transport.is_closing():
            return
        self.bytes_out += size
        if self._direct is not None:
            self._direct.write(parts)
        else:
            self._transport.writelines(parts)

    def write_direct(self) -> None:
        """Write past the transport from now on, where that is possible: for bulk."""
        transport = self.transport
        sock = transport.get_extra_info("socket")
        secret = transport.get_extra_info("ssl_object") is not None
        if sock is None or secret or self.lost or transport.get_write_buffer_size():
            return
        self._direct = DirectWriter(
            sock.fileno(), self.pause_writing, self.resume_writing, self._write_failed
        )

    def _write_failed(self, error: OSError) -> None:
        self.abort()
        self._ended(error)

    def _close_direct(self) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()

    def stalled_for(self, now: float) -> float:
        """Seconds since queued output last made progress; 0 when nothing is queued (W44)."""
        unsent = self.unsent
        if unsent != self._unsent_before or unsent == 0:
            self._unsent_before = unsent
            self.progressed = now
        return now - self.progressed

    def notice_trickle(self) -> None:
        """Be woken by the next byte, however few have come, so that a slow peer counts as alive.

        To be called several times per timeout: `LOW_WATER` could take longer than that.
        """
        self._gather(1)

    def _gather(self, count: int) -> None:
        """Wake this process only when `count` bytes have come, or the end.

        Without it a sender wakes the receiver many times per slice, which costs both as much as
        copying.
        """
        if count != self._low_water and self._gatherer is not None:
            self._low_water = count
            with contextlib.suppress(OSError):  # reset meanwhile: the read will tell
                self._gatherer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def pause_reading(self) -> None:
        """Leave what comes in the kernel."""
        if self._reading:
            self._reading = False
            if self._transport is not None:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if not self._reading:
            self._reading = True
            self.last_read = self._loop.time()
            if self._transport is not None:
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once; `on_ended` follows."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._close_direct()
        if self._transport is not None:
            self._transport.abort()

    def linger(
        self, last: Buffer, seconds: float, closed: Callable[[], None] | None = None
    ) -> None:
        """Send `last`, half-close, discard input until EOF or `seconds`, then close (W38).

        `closed` is called when that has happened. The owner hears nothing more.
        """
        self.core = _Discard()
        self._lingering = True
        self._after_linger = closed
        if self.lost or self._transport is None or self._transport.is_closing():
            self._linger_over()
            return
        self._linger_timer = self._loop.call_later(seconds, self._linger_over)
        if last:
            self.put((last,))
        self.flush()
        with contextlib.suppress(OSError):  # the peer is gone already: the linger ends by itself
            self._transport.write_eof()
        self.resume_reading()

    def _linger_over(self) -> None:
        self.abort()
        closed, self._after_linger = self._after_linger, None
        if closed is not None:
            closed()

    def _ended(self, error: Exception | None) -> None:
        if self._lingering:
            self._linger_over()
        else:
            self.owner.on_ended(self, error)


class _Discard:
    """A core that throws away what comes."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(16 * 1024))

    def get_buffer(self) -> memoryview:
        """Always the same place."""
        return self._scratch

    def buffer_updated(self, count: int) -> bool:
        """Nothing ever comes of it."""
        return False

    @property
    def expected(self) -> int:
        """Nothing."""
        return 0


def limit_unsent(stream: Stream) -> None:
    """Make the kernel take little of the control socket's output in advance (W45)."""
    sock = stream.transport.get_extra_info("socket")
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if sock is not None and option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, NOTSENT_LOWAT)


def _set_options(sock: socket.socket, stall: float) -> None:
    """W4, as far as the system has the options."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
        "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S,
        "TCP_KEEPCNT": KEEPALIVE_COUNT,
        "TCP_USER_TIMEOUT": max(1, min(int(stall * 1000), 2**31 - 1)),
    }
    for name, value in values.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
