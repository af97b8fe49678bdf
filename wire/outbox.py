"""What a group sends next: control ahead of bulk, one slot per bulk key (W24 to W27, W45 to W50).

Pure: it decides, a shell writes. Nothing is copied: frames leave as header bytes and views.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from wire.chunks import cut
from wire.frames import SLICE_BYTES
from wire.messages import BulkMessage, Message, encode_frame, frame_parts


@dataclass(slots=True)
class SendCounters:
    """msg_id and stripe counter. Per group on the syncer; one for a learner's life (W25, W26)."""

    msg_id: int = 0
    stripe: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One CHUNK to write: `head`, then `body`, on the socket `stream` (0 is control).

    `on_sent`, when it is there, is to be called after the write: the message is handed out.
    """

    stream: int
    head: bytes
    body: memoryview
    on_sent: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Bytes of the frame."""
        return len(self.head) + len(self.body)


@dataclass(slots=True, eq=False)
class _Waiting:
    head: bytes
    body: memoryview
    on_sent: Callable[[], None] | None

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body)


class _Begun:
    """The message whose slices are being handed out, over the sockets it started with (W25)."""

    def __init__(
        self, slices: Iterator[tuple[bytes, memoryview]], streams: Sequence[int], waiting: _Waiting
    ) -> None:
        self.streams = streams
        self.on_sent = waiting.on_sent
        self._slices = slices
        self.next = next(slices)

    def advance(self) -> bool:
        """Step to the next slice; false when that was the last."""
        following = next(self._slices, None)
        if following is None:
            return False
        self.next = following
        return True


class Outbox:
    """The send queues of one group.

    Messages are handed out one after the other, so at most one is partly handed out (W27 allows 8)
    and the slices of an older message always precede those of a newer one (W26).

    Attributes:
        queued: bytes of frames not yet handed out, CHUNK headers not counted.
    """

    def __init__(self, counters: SendCounters, slice_bytes: int = SLICE_BYTES) -> None:
        self.queued = 0
        self._counters = counters
        self._slice_bytes = slice_bytes
        self._control: deque[tuple[Hashable | None, bytes]] = deque()
        self._slots: dict[Hashable, _Waiting] = {}
        self._begun: _Begun | None = None

    @property
    def empty(self) -> bool:
        """Nothing is left to hand out."""
        return not (self._control or self._slots or self._begun)

    @property
    def has_control(self) -> bool:
        """A control frame waits: no CHUNK may go to stream 0 before it (W45)."""
        return bool(self._control)

    @property
    def has_bulk(self) -> bool:
        """A CHUNK waits."""
        return bool(self._slots or self._begun)

    def put_control(self, message: Message, key: Hashable | None = None) -> None:
        """Queue a control message; `key` lets it be withdrawn while it is unsent."""
        frame = encode_frame(message)
        self.queued += len(frame)
        self._control.append((key, frame))

    def withdraw_control(self, key: Hashable) -> bool:
        """Drop every unsent control message with `key` (W45); whether there was one."""
        kept: deque[tuple[Hashable | None, bytes]] = deque()
        for entry in self._control:
            if entry[0] is not None and entry[0] == key:
                self.queued -= len(entry[1])
            else:
                kept.append(entry)
        found = len(kept) < len(self._control)
        self._control = kept
        return found

    def put_bulk(
        self, key: Hashable, message: BulkMessage, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Queue a tensor message in the slot `key`, in place of an unsent one there (W46, W49).

        A replacement keeps the place in the order that the slot had. `on_sent` comes back with
        the last slice.
        """
        head, body = frame_parts(message)
        waiting = _Waiting(head, memoryview(body).cast("B"), on_sent)
        replaced = self._slots.get(key)
        if replaced is not None:
            self.queued -= replaced.size
        self._slots[key] = waiting
        self.queued += waiting.size

    def withdraw_bulk(self, key: Hashable) -> bool:
        """Drop the message in slot `key` if no slice of it has been handed out."""
        waiting = self._slots.pop(key, None)
        if waiting is None:
            return False
        self.queued -= waiting.size
        return True

    def next_control(self) -> bytes | None:
        """The next control frame for stream 0."""
        if not self._control:
            return None
        _, frame = self._control.popleft()
        self.queued -= len(frame)
        return frame

    def next_bulk(self, attached: Sequence[int], free: Sequence[int]) -> Outgoing | None:
        """The next CHUNK, and the socket it goes to.

        Args:
            attached: data sockets attached now, ascending; a message that starts now uses these,
                or stream 0 when there is none (W25).
            free: sockets below their in-flight mark, stream 0 included (W47).
        """
        begun = self._begun
        if begun is None and not self._slots:
            return None
        streams = tuple(attached) or (0,) if begun is None else begun.streams
        stream = self._choose(streams, free)
        if stream is None:
            return None
        if begun is None:
            begun = self._begin(streams)
        head, body = begun.next
        self.queued -= len(body)
        if begun.advance():
            return Outgoing(stream, head, body)
        self._begun = None
        return Outgoing(stream, head, body, begun.on_sent)

    def _begin(self, streams: Sequence[int]) -> _Begun:
        key = next(iter(self._slots))
        waiting = self._slots.pop(key)
        self.queued -= len(waiting.head)
        slices = cut(self._counters.msg_id, waiting.head, waiting.body, self._slice_bytes)
        self._counters.msg_id += 1
        self._begun = _Begun(slices, streams, waiting)
        return self._begun

    def _choose(self, streams: Sequence[int], free: Sequence[int]) -> int | None:
        """The next socket in turn that is free; the turn goes on after it (W25)."""
        count = len(streams)
        for step in range(count):
            stream = streams[(self._counters.stripe + step) % count]
            if stream in free and not (stream == 0 and self._control):
                self._counters.stripe += step + 1
                return stream
        return None
