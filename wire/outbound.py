"""What a group sends: control at once, bulk slice by slice, as fast as its sockets take it.

The group's half between whoever sends and the sockets; `Outbox` decides what is next. See
`wire.group`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping

from wire.messages import BulkMessage, Message, encode_frame
from wire.outbox import Outbox, SendCounters
from wire.stream import Stream

SLICES_PER_TURN = 8
"""CHUNKs written before the event loop gets a turn."""


class Outbound:
    """All writing of one group.

    Attributes:
        data: indices of the data sockets attached now, ascending.
    """

    def __init__(self, streams: Mapping[int, Stream], counters: SendCounters) -> None:
        """`streams` is the group's, by index; it stays the group's to change."""
        self.data: list[int] = []
        self._streams = streams
        self._outbox = Outbox(counters)
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._pump_due = False
        self._flushers: list[asyncio.Future[None]] = []
        self._control_flushers: list[asyncio.Future[bool]] = []

    @property
    def queued_bytes(self) -> int:
        """Bytes to send that the kernel does not have yet."""
        return self._outbox.queued + sum(stream.unsent for stream in self._streams.values())

    def add_data(self, index: int) -> None:
        """Messages that start from now on use this socket too (W25)."""
        self.data.append(index)
        self.data.sort()

    def send_control(self, message: Message, key: Hashable | None) -> None:
        """See `Group`."""
        if self._stopped:
            return
        control = self._streams.get(0)
        if control is None or control.busy or self._outbox.has_control:
            self._outbox.put_control(message, key)
        else:
            control.send(encode_frame(message))
        if self._flushers or self._control_flushers:
            self._pump_soon()

    def withdraw_control(self, key: Hashable) -> bool:
        """See `Group`."""
        return self._outbox.withdraw_control(key)

    def send_bulk(
        self, key: Hashable, message: BulkMessage, on_sent: Callable[[], None] | None
    ) -> None:
        """See `Group`."""
        if not self._stopped:
            self._outbox.put_bulk(key, message, on_sent)
            self._write_bulk()
            self._pump_soon()

    def withdraw_bulk(self, key: Hashable) -> bool:
        """See `Group`."""
        return self._outbox.withdraw_bulk(key)

    async def flush(self) -> None:
        """See `Group`."""
        while not (self._stopped or self._all_sent()):
            waiter = self._loop.create_future()
            self._flushers.append(waiter)
            await waiter

    def control_sent(self) -> asyncio.Future[bool]:
        """See `Group`."""
        sent: asyncio.Future[bool] = self._loop.create_future()
        self._control_flushers.append(sent)
        if self._stopped:
            self._settle_control(False)
        else:
            self.pump()
        return sent

    def pump(self) -> None:
        """Give the transports what they can take."""
        self._pump_due = False
        if not self._stopped:
            self._write_control()
            if self._outbox.has_bulk:
                self._write_bulk()
            for stream in self._streams.values():
                stream.flush()
            if self._control_flushers:
                self._settle_if_sent()
        if self._flushers and self._all_sent():
            self._wake_flushers()

    def stop(self) -> None:
        """Send no more; what this turn of the loop has collected goes out, the rest is dropped."""
        if self._pump_due:
            self.pump()
        self._stopped = True
        self._outbox = Outbox(SendCounters())
        self._wake_flushers()
        self._settle_control(False)

    def _pump_soon(self) -> None:
        """Pump once this turn of the loop is over: what it brings for one socket goes together.

        Unless a socket is behind, the peer sees everything in the order in which it was sent here.
        """
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self.pump)

    def _write_control(self) -> None:
        control = self._streams.get(0)
        while control is not None and not control.busy:
            frame = self._outbox.next_control()
            if frame is None:
                return
            control.put((frame,))

    def _write_bulk(self) -> None:
        for _ in range(SLICES_PER_TURN):
            free = [index for index, stream in self._streams.items() if not stream.busy]
            chunk = self._outbox.next_bulk(self.data, free) if free else None
            if chunk is None:
                return
            stream = self._streams[chunk.stream]
            stream.put((chunk.head, chunk.body))
            if chunk.on_sent is not None:
                stream.flush()
                chunk.on_sent()
        self._pump_soon()

    def _all_sent(self) -> bool:
        waits = self._pump_due or not self._outbox.empty
        return not (waits or any(stream.busy for stream in self._streams.values()))

    def _wake_flushers(self) -> None:
        for waiter in self._flushers:
            if not waiter.done():
                waiter.set_result(None)
        self._flushers.clear()

    def _settle_if_sent(self) -> None:
        control = self._streams.get(0)
        if control is not None and not (control.busy or self._outbox.has_control):
            self._settle_control(True)

    def _settle_control(self, sent: bool) -> None:
        for waiter in self._control_flushers:
            if not waiter.done():
                waiter.set_result(sent)
        self._control_flushers.clear()
