"""A connection group: one control and S data sockets as one message channel, both roles.

What it adds to its parts: `Connection` reads one socket, `Reassembler` joins the sockets, `Scanner`
looks at tensors in threads, `Outbox` decides what is sent next. The group connects them, keeps
deliveries in order, and decides when it all ends (sections 9 and 10).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from wire.chunks import Reassembler
from wire.connection import BadBudget, Connection, Event, Progress, Received
from wire.errors import ErrorCode, ProtocolError
from wire.frames import Role
from wire.limits import Session
from wire.memory import SlabPool
from wire.messages import (
    Broadcast,
    BulkMessage,
    ErrorMessage,
    FinalFragment,
    Heartbeat,
    InitParams,
    Message,
    PushFragment,
    encode_frame,
)
from wire.outbox import Outbox, SendCounters
from wire.scanning import Scanner
from wire.stream import Stream, limit_unsent
from wire.tls import PeerCertificate

__all__ = ["Group", "GroupSink", "SendCounters", "Timeouts"]

MAX_WAITING = 2
"""Tensor messages that may wait for the owner before the group is not read any more (W48)."""
CONTROL_BATCH_BYTES = 16 * 1024
"""Control frames given to the transport at once; the rest can still be withdrawn (W45)."""
SLICES_PER_TURN = 8
"""CHUNKs written before the event loop gets a turn."""
_TICKS = 8
"""Liveness checks per timeout."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds.

    Attributes:
        handshake: for the first frame, and for a data socket to find its group (W7, W17).
        heartbeat: silence of a group that has sent a HEARTBEAT; syncer only (W43).
        stall: output or reassembly without progress, and TCP_USER_TIMEOUT (W4, W32, W44).
        linger: for an ERROR to reach the peer (W38).
        dial: for all sockets of a new group; learner only (L11).
    """

    handshake: float = 10.0
    heartbeat: float = 60.0
    stall: float = 60.0
    linger: float = 1.0
    dial: float = 30.0


class GroupSink(Protocol):
    """Who gets a group's messages. Called on the event loop; must not block."""

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """A message that passed W11, in order of completion; `arrived`: loop time of its end."""

    def on_closed(self, group: Group, reason: str) -> None:
        """The group has closed. Once, after every message that was complete before (W39)."""

    def on_bad_budget(self, group: Group) -> None:
        """BUDGET_DONE of a wrong length (C75), if asked for; the group then closes by itself."""


@dataclass(slots=True, eq=False)
class _Delivery:
    message: Message
    arrived: float
    ready: bool


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
        self._report_bad_budget = report_bad_budget
        self._loop = asyncio.get_running_loop()
        self._pool = pool or SlabPool()
        self._chunks = Reassembler(session.role, session.inner_limit, self._pool)
        self._scanner = Scanner(session, executor)
        self._outbox = Outbox(counters or SendCounters())
        self._streams: dict[int, Stream] = {}
        self._connections: dict[Stream, Connection] = {}
        self._data: list[int] = []
        self._deliveries: deque[_Delivery] = deque()
        self._waiting = 0
        self._paused = False
        self._heartbeat_seen = False
        self._ending = False
        self._pump_again = False
        self._reason = ""
        self._announced = session.role is Role.SYNCER
        self._reported = False
        self._flushers: list[asyncio.Future[None]] = []
        self._sockets_closed = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._next_tick = 0.0
        self._ticker = self._schedule_tick()

    # -- facts -------------------------------------------------------------------------------

    @property
    def learner_id(self) -> int:
        """The group's learner."""
        return self.session.learner_id

    @property
    def attached(self) -> int:
        """Data sockets attached now."""
        return len(self._data)

    @property
    def queued_bytes(self) -> int:
        """Bytes to send that the kernel does not have yet."""
        return self._outbox.queued + sum(stream.unsent for stream in self._streams.values())

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
        """Queue a control message, ahead of all bulk (W45); `key` is for `withdraw_control`."""
        if not self.closed:
            self._outbox.put_control(message, key)
            self._pump()

    def withdraw_control(self, key: Hashable) -> bool:
        """Drop the unsent control messages with `key`; whether there was one (W45)."""
        return self._outbox.withdraw_control(key)

    def send_bulk(
        self, key: Hashable, message: BulkMessage, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Queue a tensor message; it replaces one with the same key that is unsent (W46, W49).

        The tensor must not change until it is sent. `on_sent` is called when the last slice has
        gone to its transport; never for a replaced, withdrawn or dropped message.
        """
        if not self.closed:
            self._outbox.put_bulk(key, message, on_sent)
            self._pump()

    def withdraw_bulk(self, key: Hashable) -> bool:
        """Drop the message with `key` if no slice of it has been sent."""
        return self._outbox.withdraw_bulk(key)

    async def flush(self) -> None:
        """Wait until all queued output is in the kernel, or the group is closed."""
        while not (self.closed or self._all_sent()):
            waiter = self._loop.create_future()
            self._flushers.append(waiter)
            await waiter

    # -- back-pressure -----------------------------------------------------------------------

    def hold(self) -> None:
        """Count a tensor message as waiting; call inside `on_message`, then `release` (W48)."""
        self._waiting += 1
        self._check_waiting()

    def release(self) -> None:
        """A message that was held has been handled."""
        self._waiting -= 1
        self._check_waiting()

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
        connection = stream.core if isinstance(stream.core, Connection) else self.connection()
        stream.core = connection
        stream.owner = self
        self._streams[index] = stream
        self._connections[stream] = connection
        if index == 0:
            limit_unsent(stream)
        else:
            self._data.append(index)
            self._data.sort()
        if stream.lost:
            self._loop.call_soon(self.on_ended, stream, None)
        elif not self._paused:
            stream.resume_reading()
        self._pump()

    def connection(self) -> Connection:
        """A core for a socket of this group."""
        return Connection(self.session, self._chunks, report_bad_budget=self._report_bad_budget)

    def confirm(self) -> None:
        """The dial that makes this group has succeeded: `on_closed` is owed from now on.

        Raises:
            ConnectionError: it has closed meanwhile.
        """
        if self.closed:
            raise self.cause if isinstance(self.cause, OSError) else ConnectionError(self._reason)
        self._announced = True

    def on_connected(self, stream: Stream) -> None:
        """Streams are connected before they attach."""

    def on_bytes(self, stream: Stream) -> None:
        """See `StreamOwner`."""
        if stream in self._connections and not self.closed:
            self._process(stream)

    def on_fault(self, stream: Stream, error: ProtocolError) -> None:
        """See `StreamOwner`."""
        self._break(error)

    def on_drained(self, stream: Stream) -> None:
        """See `StreamOwner`."""
        self._pump()

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

    # -- inbound -----------------------------------------------------------------------------

    def _process(self, stream: Stream, *, rest: bool = False) -> None:
        """Take the events of one socket; `rest`: even if the owner is behind, nothing follows."""
        connection = self._connections[stream]
        try:
            while not self.closed and (rest or not self._paused):
                event = connection.next_event()
                if event is None:
                    break
                self._handle(event, stream.last_read)
        except ProtocolError as error:
            self._break(error)
        if connection.blocked or self._paused:
            stream.pause_reading()

    def _handle(self, event: Event, arrived: float) -> None:
        match event:
            case Progress(partial=landing):
                self._scanner.progress(landing)
            case Received(source=source):
                if source is not None:
                    self._unblock()
                self._receive(event, arrived)
            case BadBudget():
                self._sink.on_bad_budget(self)
                raise ProtocolError(ErrorCode.BAD_LENGTH, "BUDGET_DONE is not 8 bytes long")

    def _receive(self, event: Received, arrived: float) -> None:
        message = event.message
        delivery = _Delivery(message, arrived, ready=True)
        dtype = self.session.tensor_dtype(message)
        if isinstance(message, InitParams | PushFragment | Broadcast | FinalFragment) and dtype:
            verdict = partial(self._judged, delivery)
            tensor = memoryview(message.tensor)
            delivery.ready = self._scanner.complete(event.source, tensor, dtype, verdict)
            if not delivery.ready:
                self.hold()
        elif isinstance(message, Heartbeat):
            self._heartbeat_seen = True
        self._deliveries.append(delivery)
        self._deliver()

    def _judged(self, delivery: _Delivery, error: ProtocolError | None) -> None:
        """A worker has scanned the tensor of a message."""
        delivery.ready = True
        if error is not None and delivery in self._deliveries:
            while self._deliveries.pop() is not delivery:
                pass  # what came after the fault does not count
            self._break(error)
        self._deliver()
        self.release()

    def _deliver(self) -> None:
        while self._deliveries and self._deliveries[0].ready:
            delivery = self._deliveries.popleft()
            self._sink.on_message(self, delivery.message, delivery.arrived)
        if self.closed:
            self._announce()

    def _check_waiting(self) -> None:
        paused = self._waiting >= MAX_WAITING
        if paused == self._paused or self.closed:
            return
        self._paused = paused
        if paused:
            for stream in self._connections:
                stream.pause_reading()
        else:
            self._loop.call_soon(self._resume)

    def _unblock(self) -> None:
        """A message is complete: slices that waited for memory may go on (W32)."""
        if any(connection.blocked for connection in self._connections.values()):
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        for stream, connection in list(self._connections.items()):
            if self.closed or self._paused:
                return
            self._process(stream)
            if not (self.closed or self._paused or connection.blocked):
                stream.resume_reading()

    # -- outbound ----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give the transports what they can take."""
        self._pump_again = False
        if not self.closed:
            self._write_control()
            self._write_bulk()
        if self._flushers and self._all_sent():
            self._wake_flushers()

    def _write_control(self) -> None:
        control = self._streams.get(0)
        while control is not None and not control.busy and self._outbox.has_control:
            frames: list[bytes] = []
            size = 0
            while size < CONTROL_BATCH_BYTES:
                frame = self._outbox.next_control()
                if frame is None:
                    break
                frames.append(frame)
                size += len(frame)
            control.write(frames)

    def _write_bulk(self) -> None:
        for _ in range(SLICES_PER_TURN):
            free = [index for index, stream in self._streams.items() if not stream.busy]
            chunk = self._outbox.next_bulk(self._data, free) if free else None
            if chunk is None:
                return
            self._streams[chunk.stream].write((chunk.head, chunk.body))
            if chunk.on_sent is not None:
                chunk.on_sent()
        if not self._pump_again:
            self._pump_again = True
            self._loop.call_soon(self._pump)

    def _all_sent(self) -> bool:
        return self._outbox.empty and not any(s.busy for s in self._streams.values())

    def _wake_flushers(self) -> None:
        for waiter in self._flushers:
            if not waiter.done():
                waiter.set_result(None)
        self._flushers.clear()

    # -- the end -----------------------------------------------------------------------------

    def _break(self, error: ProtocolError) -> None:
        """The peer broke a rule (section 9)."""
        if not self.closed:
            self.fault = error
            self._shut(error.text, error if self.session.role is Role.SYNCER else None)

    def _read_out(self, seen: int, quiet: int, deadline: float) -> None:
        """Wait until two turns of the loop have brought no more bytes, then close."""
        if self.closed:
            return
        if self.bytes_in != seen:
            quiet = 0
        if quiet < 2 and self._loop.time() < deadline:
            self._loop.call_soon(self._read_out, self.bytes_in, quiet + 1, deadline)
            return
        for stream in list(self._connections):
            self._process(stream, rest=True)
        self._shut(self._reason, None)

    def _shut(self, reason: str, error: ProtocolError | None, *, linger: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        self._reason = reason
        self._ticker.cancel()
        self._outbox = Outbox(SendCounters())
        self._chunks.clear()
        self._scanner.clear()
        self._wake_flushers()
        if self._on_gone is not None:
            self._on_gone(self)
        for stream in self._connections:
            stream.pause_reading()
        control = self._streams.get(0)
        if control is not None and (error is not None or linger):
            last = encode_frame(ErrorMessage(error.text)) if error is not None else b""
            control.linger(last, self.timeouts.linger, self._close_sockets)
        else:
            self._close_sockets()
        self._loop.call_soon(self._deliver)

    def _close_sockets(self) -> None:
        """Control first: a peer must not see a data socket die before it (W38)."""
        for _, stream in sorted(self._streams.items()):
            stream.abort()
        self._sockets_closed = True
        self._announce_gone()

    def _announce(self) -> None:
        """Tell the sink, once everything that was complete has been delivered (W39)."""
        if self._deliveries or self._reported:
            return
        self._reported = True
        if self._announced:
            self._sink.on_closed(self, self._reason)
        self._announce_gone()

    def _announce_gone(self) -> None:
        if self._sockets_closed and self._reported and not self._gone.done():
            self._gone.set_result(None)

    # -- liveness ----------------------------------------------------------------------------

    def _schedule_tick(self) -> asyncio.TimerHandle:
        pause = min(self.timeouts.heartbeat, self.timeouts.stall) / _TICKS
        self._next_tick = self._loop.time() + pause
        return self._loop.call_later(pause, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._pool.age(now)
        late = now - self._next_tick
        self._ticker = self._schedule_tick()
        if late > 2 * (self._next_tick - now):
            return  # the loop was stopped: what has arrived meanwhile must be read first
        silence = now - max((s.last_read for s in self._streams.values()), default=now)
        timeouts = self.timeouts
        blocked = any(connection.blocked for connection in self._connections.values())
        if any(stream.stalled_for(now) > timeouts.stall for stream in self._streams.values()):
            self._shut(f"output has made no progress for {timeouts.stall:g} s", None)
        elif self._paused:
            return  # we do not read: the silence is ours
        elif blocked and silence > timeouts.stall:
            self._shut(f"reassembly has made no progress for {timeouts.stall:g} s", None)
        elif (
            self.session.role is Role.SYNCER
            and self._heartbeat_seen
            and silence > timeouts.heartbeat
        ):
            self._shut(f"no byte for {timeouts.heartbeat:g} s", None)
