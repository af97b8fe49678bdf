"""A connection group: one control and S data sockets as one message channel, both roles.

`Inbound` reads the sockets, joins slices and scans tensors; `Outbound` writes them. The group
connects both to its sockets and its sink, and decides when it all ends (sections 9, 10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import Protocol

from wire.connection import Connection
from wire.errors import ProtocolError
from wire.frames import Role
from wire.inbound import Inbound
from wire.limits import Session
from wire.liveness import Timeouts, Watch
from wire.memory import SlabPool
from wire.messages import BulkMessage, ErrorMessage, Message, encode_frame
from wire.outbound import Outbound
from wire.outbox import SendCounters
from wire.stream import Stream, limit_unsent
from wire.tls import PeerCertificate

__all__ = ["Group", "GroupSink", "SendCounters", "Timeouts"]


class GroupSink(Protocol):
    """Who gets a group's messages. Called on the event loop; must not block."""

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """A message that passed W11, in order of completion; `arrived`: loop time of its end."""

    def on_closed(self, group: Group, reason: str) -> None:
        """The group has closed. Once, after every message that was complete before (W39)."""

    def on_bad_budget(self, group: Group) -> None:
        """BUDGET_DONE of a wrong length (C75), if asked for; the group then closes by itself."""


class Group:
    """All sockets of one (learner id, generation). Every method belongs to the loop's thread.

    Attributes:
        session: role, layout, dtype and learner id.
        generation: the learner's number for this group.
        num_streams: S as declared in HELLO.
        closed: closing has begun; what is sent from now on is dropped (W5).
        fault: the rule that the peer broke, if that is why it closed. Fatal to a learner (W40).
        certificate: what the client showed with its HELLO under TLS; syncer only (S12).
        cause: the I/O error, if that is why it closed (`TlsFailure` under TLS).
    """

    def __init__(
        self,
        *,
        session: Session,
        generation: int,
        num_streams: int,
        sink: GroupSink,
        executor: Executor,
        timeouts: Timeouts,
        counters: SendCounters | None = None,
        pool: SlabPool | None = None,
        report_bad_budget: bool = False,
        certificate: PeerCertificate | None = None,
        on_gone: Callable[[Group], None] | None = None,
    ) -> None:
        self.session = session
        self.generation = generation
        self.num_streams = num_streams
        self.closed = False
        self.fault: ProtocolError | None = None
        self.cause: Exception | None = None
        self.timeouts = timeouts
        self.certificate = certificate
        self._sink = sink
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        # A group of its own handles one message after the other: one slab waits for the next.
        self._pool = pool or SlabPool(keep=1)
        self._inbound = Inbound(
            session, self, executor, self._pool, report_bad_budget=report_bad_budget
        )
        self._streams: dict[int, Stream] = {}
        self._arriving: set[Stream] = set()
        self._outbound = Outbound(self._streams, counters or SendCounters())
        self._ending = False
        self._reason = ""
        self._announced = session.role is Role.SYNCER
        self._reported = False
        self._sockets_closed = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._watch = Watch(timeouts, self._check_liveness)

    # -- facts -------------------------------------------------------------------------------

    @property
    def learner_id(self) -> int:
        """The group's learner."""
        return self.session.learner_id

    @property
    def attached(self) -> int:
        """Data sockets attached now."""
        return len(self._outbound.data)

    @property
    def queued_bytes(self) -> int:
        """Bytes to send that the kernel does not have yet."""
        return self._outbound.queued_bytes

    @property
    def bytes_in(self) -> int:
        """Bytes received on all sockets."""
        return sum(stream.bytes_in for stream in self._streams.values())

    @property
    def bytes_out(self) -> int:
        """Bytes written to all sockets."""
        return sum(stream.bytes_out for stream in self._streams.values())

    @property
    def peer(self) -> str:
        """Address and port of the other end of the control socket."""
        return self._streams[0].peer if 0 in self._streams else "?"

    def takes(self, index: int) -> bool:
        """Whether a socket may attach as stream `index` (1..S) now (W17)."""
        return 1 <= index <= self.num_streams and index not in self._streams and not self.closed

    # -- sending -----------------------------------------------------------------------------

    def send_control(self, message: Message, key: Hashable | None = None) -> None:
        """Queue a control message, ahead of all bulk (W45); `key` is for `withdraw_control`.

        It goes out at once, and takes along what this turn of the loop has collected before it.
        """
        self._outbound.send_control(message, key)

    def withdraw_control(self, key: Hashable) -> bool:
        """Drop the unsent control messages with `key`; whether there was one (W45)."""
        return self._outbound.withdraw_control(key)

    def send_bulk(
        self, key: Hashable, message: BulkMessage, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Queue a tensor message; it replaces one with the same key that is unsent (W46, W49).

        The tensor must not change until it is sent. `on_sent` is called when the last slice has
        gone to its transport; never for a replaced, withdrawn or dropped message.
        """
        self._outbound.send_bulk(key, message, on_sent)

    def withdraw_bulk(self, key: Hashable) -> bool:
        """Drop the message with `key` if no slice of it has been sent."""
        return self._outbound.withdraw_bulk(key)

    async def flush(self) -> None:
        """Wait until all queued output is in the kernel, or the group is closed."""
        await self._outbound.flush()

    def control_sent(self) -> asyncio.Future[bool]:
        """Done once all control output queued so far is in the kernel, whatever bulk still waits.

        Its result is False when the group closed before that.
        """
        return self._outbound.control_sent()

    # -- back-pressure -----------------------------------------------------------------------

    def hold(self) -> None:
        """Count a tensor message as waiting; call inside `on_message`, then `release` (W48)."""
        self._inbound.hold()

    def release(self) -> None:
        """A message that was held has been handled."""
        self._inbound.release()

    # -- closing -----------------------------------------------------------------------------

    def close(self, error: ProtocolError | None = None) -> None:
        """Close now, dropping what is queued; with `error`, the peer is told first (W38)."""
        self._shut(error.text if error is not None else "closed", error)

    async def finish(self) -> None:
        """Send what is queued, half-close, let the peer close, then close everything."""
        await self.flush()
        if not self.closed:
            self._shut("finished", None, linger=True)
        await self.wait_closed()

    async def wait_closed(self) -> None:
        """Wait until `on_closed` has been called and the sockets are closed."""
        await asyncio.shield(self._gone)

    # -- sockets (wire.accept, wire.dial) ----------------------------------------------------

    def attach(self, index: int, stream: Stream) -> None:
        """Take a socket into the group, as control (0) or data socket (1..S)."""
        self._arriving.discard(stream)
        if self.closed:
            stream.abort()
            return
        stream.owner = self
        self._streams[index] = stream
        if index == 0:
            limit_unsent(stream)
        else:
            if self.session.role is Role.LEARNER:
                stream.write_direct()  # beside it a training thread needs the interpreter
            self._outbound.add_data(index)
        self._inbound.add(stream)
        if stream.lost:
            self._loop.call_soon(self.on_ended, stream, None)
        self._outbound.pump()

    def connection(self) -> Connection:
        """A core for a socket of this group."""
        return self._inbound.connection()

    def confirm(self) -> None:
        """The dial that makes this group has succeeded: `on_closed` is owed from now on.

        Raises:
            ConnectionError: it has closed meanwhile.
        """
        if self.closed:
            raise self.cause if isinstance(self.cause, OSError) else ConnectionError(self._reason)
        self._announced = True

    def on_connected(self, stream: Stream) -> None:
        """A socket of a dial: what the syncer says at once is read at once."""
        if self.closed:
            stream.abort()
        else:
            self._arriving.add(stream)
            self._inbound.add(stream)

    def on_bytes(self, stream: Stream) -> None:
        """See `StreamOwner`."""
        self._inbound.process(stream)

    def on_fault(self, stream: Stream, error: ProtocolError) -> None:
        """See `StreamOwner`."""
        self.on_broken(error)

    def on_drained(self, stream: Stream) -> None:
        """See `StreamOwner`."""
        self._outbound.pump()

    def on_ended(self, stream: Stream, error: Exception | None) -> None:
        """A socket is at its end, so the whole group is, once the others are read empty.

        What the peer had sent completely on another socket before, an ERROR or a PUSH, may still be
        in the kernel (W38, W39).
        """
        if self.closed or self._ending:
            return
        self._ending = True
        self.cause = error
        self._reason = str(error) if error is not None else "the peer closed the connection"
        deadline = self._loop.time() + self.timeouts.linger
        self._loop.call_soon(self._read_out, self.bytes_in, 0, deadline)

    # -- InboundOwner ------------------------------------------------------------------------

    def on_delivery(self, message: Message, arrived: float) -> None:
        """See `InboundOwner`."""
        self._sink.on_message(self, message, arrived)

    def on_bad_budget(self) -> None:
        """See `InboundOwner`."""
        self._sink.on_bad_budget(self)

    def on_quiet(self) -> None:
        """See `InboundOwner`: tell the sink that it is over (W39)."""
        if not self._reported:
            self._reported = True
            if self._announced:
                self._sink.on_closed(self, self._reason)
            self._announce_gone()

    def on_broken(self, error: ProtocolError) -> None:
        """See `InboundOwner`: the peer broke a rule (section 9)."""
        if not self.closed:
            self.fault = error
            self._shut(error.text, error if self.session.role is Role.SYNCER else None)

    # -- the end -----------------------------------------------------------------------------

    def _read_out(self, seen: int, quiet: int, deadline: float) -> None:
        """Wait until two turns of the loop have brought no more bytes, then close."""
        if self.closed:
            return
        if self.bytes_in != seen:
            quiet = 0
        if quiet < 2 and self._loop.time() < deadline:
            self._loop.call_soon(self._read_out, self.bytes_in, quiet + 1, deadline)
            return
        for stream in list(self._streams.values()):
            self._inbound.process(stream, rest=True)
        self._shut(self._reason, None)

    def _shut(self, reason: str, error: ProtocolError | None, *, linger: bool = False) -> None:
        if self.closed:
            return
        self._outbound.stop()
        self.closed = True
        self._reason = reason
        self._watch.stop()
        self._inbound.stop()
        if self._on_gone is not None:
            self._on_gone(self)
        control = self._streams.get(0)
        if control is not None and (error is not None or linger):
            last = encode_frame(ErrorMessage(error.text)) if error is not None else b""
            control.linger(last, self.timeouts.linger, self._close_sockets)
        else:
            self._close_sockets()
        self._loop.call_soon(self._inbound.deliver)

    def _close_sockets(self) -> None:
        """Control first: a peer must not see a data socket die before it (W38)."""
        for stream in (*(self._streams[index] for index in sorted(self._streams)), *self._arriving):
            stream.abort()
        self._sockets_closed = True
        self._announce_gone()

    def _announce_gone(self) -> None:
        if self._sockets_closed and self._reported and not self._gone.done():
            self._gone.set_result(None)

    # -- liveness ----------------------------------------------------------------------------

    def _check_liveness(self, now: float) -> None:
        self._pool.age(now)
        for stream in self._streams.values():
            stream.notice_trickle()
        reason = self._stuck(now)
        if reason is not None:
            self._shut(reason, None)

    def _stuck(self, now: float) -> str | None:
        """Why the group must go, if it must."""
        streams = self._streams.values()
        stall, heartbeat = self.timeouts.stall, self.timeouts.heartbeat
        if max((stream.stalled_for(now) for stream in streams), default=0.0) > stall:
            return f"output has made no progress for {stall:g} s"
        if self._inbound.paused:
            return None  # we do not read: the silence is ours
        silence = now - max((stream.last_read for stream in streams), default=now)
        if self._inbound.blocked and silence > stall:
            return f"reassembly has made no progress for {stall:g} s"
        if self.session.role is Role.LEARNER or not self._inbound.heartbeat_seen:
            return None
        return f"no byte for {heartbeat:g} s" if silence > heartbeat else None
