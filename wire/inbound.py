"""What a group receives: sockets read, slices joined, tensors scanned, messages in order.

The group's half between the sockets and its sink; see `wire.group`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from wire.chunks import Reassembler
from wire.connection import BadBudget, Connection, Progress, Received
from wire.errors import ErrorCode, ProtocolError
from wire.limits import Session
from wire.memory import SlabPool
from wire.messages import (
    Broadcast,
    FinalFragment,
    Heartbeat,
    InitParams,
    Message,
    PushFragment,
)
from wire.scanning import Scanner
from wire.stream import Stream

TENSORS = (InitParams, PushFragment, Broadcast, FinalFragment)
"""Messages that are scanned."""
MAX_WAITING = 2
"""Tensor messages that may wait for the owner before the group is not read any more (W48)."""


class InboundOwner(Protocol):
    """The group, as far as its inbound half needs it."""

    def on_delivery(self, message: Message, arrived: float) -> None:
        """The next message, checked and in order."""

    def on_bad_budget(self) -> None:
        """BUDGET_DONE of a wrong length; a fault follows."""

    def on_quiet(self) -> None:
        """Stopped, and all that was complete has been delivered; may come more than once."""

    def on_broken(self, error: ProtocolError) -> None:
        """The peer broke a rule; nothing that came after it will be delivered."""


@dataclass(slots=True, eq=False)
class _Delivery:
    message: Message
    arrived: float
    ready: bool


class Inbound:
    """All reading of one group.

    Attributes:
        stopped: nothing more is taken from the sockets.
        paused: the owner is behind, so the sockets are not read (W48).
        heartbeat_seen: the peer has sent a HEARTBEAT (W43).
    """

    def __init__(
        self,
        session: Session,
        owner: InboundOwner,
        executor: Executor,
        pool: SlabPool,
        *,
        report_bad_budget: bool,
    ) -> None:
        self.stopped = False
        self.paused = False
        self.heartbeat_seen = False
        self._session = session
        self._owner = owner
        self._report_bad_budget = report_bad_budget
        self._loop = asyncio.get_running_loop()
        self._chunks = Reassembler(session.role, session.inner_limit, pool)
        self._scanner = Scanner(session, executor)
        self._connections: dict[Stream, Connection] = {}
        self._blocked: set[Connection] = set()
        self._deliveries: deque[_Delivery] = deque()
        self._waiting = 0

    @property
    def blocked(self) -> bool:
        """A socket is not read until a message completes (W32)."""
        return bool(self._blocked)

    def connection(self) -> Connection:
        """A core for a socket that may join."""
        return Connection(self._session, self._chunks, report_bad_budget=self._report_bad_budget)

    def add(self, stream: Stream) -> None:
        """Read a socket from now on."""
        core = stream.core
        connection = core if isinstance(core, Connection) else self.connection()
        stream.core = connection
        self._connections[stream] = connection
        self.process(stream)
        if not (self.paused or self.stopped or connection.blocked):
            stream.resume_reading()

    def stop(self) -> None:
        """Read no more; what is partial is dropped, what is complete is delivered (W34, W39)."""
        self.stopped = True
        self._chunks.clear()
        self._scanner.clear()
        for stream in self._connections:
            stream.pause_reading()

    def hold(self) -> None:
        """One more tensor message waits."""
        self._waiting += 1
        self._check_waiting()

    def release(self) -> None:
        """One less waits."""
        self._waiting -= 1
        self._check_waiting()

    def process(self, stream: Stream, *, rest: bool = False) -> None:
        """Take the events of one socket; `rest`: even if the owner is behind, nothing follows."""
        connection = self._connections.get(stream)
        if connection is None:
            return
        try:
            while not self.stopped and (rest or not self.paused):
                event = connection.next_event()
                if event is None:
                    break
                if isinstance(event, Received):
                    self._receive(event, stream.last_read)
                else:
                    self._handle(event)
        except ProtocolError as error:
            if not self.stopped:
                self._owner.on_broken(error)
        if self.stopped:
            return  # an ERROR may linger on this very socket, which then reads to the end (W38)
        if connection.blocked:
            self._blocked.add(connection)
        elif self._blocked:
            self._blocked.discard(connection)
        if connection.blocked or self.paused:
            stream.pause_reading()

    def deliver(self) -> None:
        """Hand over, in order, what is checked; say so when it was the last."""
        while self._deliveries and self._deliveries[0].ready:
            delivery = self._deliveries.popleft()
            self._owner.on_delivery(delivery.message, delivery.arrived)
        if self.stopped and not self._deliveries:
            self._owner.on_quiet()

    def _handle(self, event: Progress | BadBudget) -> None:
        match event:
            case Progress(piece):
                self._scanner.progress(piece)
            case BadBudget():
                self._owner.on_bad_budget()
                raise ProtocolError(ErrorCode.BAD_LENGTH, "BUDGET_DONE is not 8 bytes long")

    def _receive(self, event: Received, arrived: float) -> None:
        if self._blocked:  # a message is complete: memory is free again (W32)
            self._loop.call_soon(self._resume)
        message = event.message
        if isinstance(message, Heartbeat):
            self.heartbeat_seen = True
        if not (isinstance(message, TENSORS) or self._deliveries):
            self._owner.on_delivery(message, arrived)
            return
        delivery = _Delivery(message, arrived, ready=True)
        dtype = self._session.tensor_dtype(message)
        if dtype is not None and isinstance(message, TENSORS):
            verdict = partial(self._judged, delivery)
            tensor = memoryview(message.tensor)
            delivery.ready = self._scanner.complete(event.source, tensor, dtype, verdict)
            if not delivery.ready:
                self.hold()
        self._deliveries.append(delivery)
        self.deliver()

    def _judged(self, delivery: _Delivery, error: ProtocolError | None) -> None:
        """A worker has scanned the tensor of a message."""
        delivery.ready = True
        if error is not None and delivery in self._deliveries:
            while self._deliveries.pop() is not delivery:
                continue  # what came after the fault does not count
            self._owner.on_broken(error)
        self.deliver()
        self.release()

    def _check_waiting(self) -> None:
        paused = self._waiting >= MAX_WAITING
        if paused == self.paused or self.stopped:
            return
        self.paused = paused
        if paused:
            for stream in self._connections:
                stream.pause_reading()
        else:
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        for stream, connection in list(self._connections.items()):
            if self.stopped or self.paused:
                return
            self.process(stream)
            if not (self.stopped or self.paused or connection.blocked):
                stream.resume_reading()
