"""Striping and reassembly: messages cut into CHUNKs and put together again (sections 7 and 8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from wire.errors import ErrorCode, ProtocolError
from wire.frames import (
    CHUNK_BYTES,
    CHUNK_HEADER,
    FRAME_BYTES,
    SLICE_BYTES,
    MessageType,
    Role,
    frame_header,
)
from wire.memory import MAPPED_FROM, Landing, SlabPool
from wire.messages import PUSH_HEAD_BYTES, VERSIONED_HEAD_BYTES, Buffer
from wire.ranges import RangeSet

MAX_PARTIALS = 64
FINISHED_IDS = 256
SLACK_BYTES = 64 * 1024 * 1024
"""What a group's partial messages may hold beyond the largest legal one (W32)."""
ALIGNMENT = 64

LEAD = {
    Role.SYNCER: -(FRAME_BYTES + PUSH_HEAD_BYTES) % ALIGNMENT,
    Role.LEARNER: -(FRAME_BYTES + VERSIONED_HEAD_BYTES) % ALIGNMENT,
}
"""Bytes left free before an inner frame so that the tensor in it is aligned.

PUSH, BCAST and FINAL_FRAGMENT tensors begin at a multiple of 64, INIT tensors at one of 4.
"""


def cut(
    msg_id: int, head: bytes, body: Buffer, slice_bytes: int = SLICE_BYTES
) -> Iterator[tuple[bytes, memoryview]]:
    """The CHUNK frames of the inner frame `head + body`, in order (W24).

    Each is (frame bytes to send first, view into `body` to send after them); nothing of `body` is
    copied. `head` is shorter than a slice.
    """
    view = memoryview(body).cast("B")
    total = len(head) + len(view)
    for offset in range(0, total, slice_bytes):
        length = min(slice_bytes, total - offset)
        prefix = frame_header(MessageType.CHUNK, CHUNK_BYTES + length)
        prefix += CHUNK_HEADER.pack(msg_id, total, offset)
        if offset == 0:
            yield prefix + head, view[: length - len(head)]
        else:
            at = offset - len(head)
            yield prefix, view[at : at + length]


class Partial:
    """One inner frame of which some bytes have arrived.

    Attributes:
        msg_id: None for a frame that came outside CHUNKs.
        total: bytes of the inner frame, its 13-byte header included.
        view: where they land.
        received: bytes landed.
    """

    __slots__ = ("_landing", "msg_id", "open", "promised", "received", "total", "view")

    def __init__(self, msg_id: int | None, total: int, landing: Landing) -> None:
        self.msg_id = msg_id
        self.total = total
        self.received = 0
        self.promised = RangeSet()
        self.open: list[Slice] = []
        self.view = landing.view
        self._landing = landing

    @property
    def prefix(self) -> int:
        """Bytes landed from 0 on without a gap."""
        landing = (piece.start + piece.filled for piece in self.open)
        return min(self.promised.prefix, min(landing, default=self.total))

    @property
    def held(self) -> int:
        """Memory charged for it (W32): touched pages, or all of it where it was taken whole."""
        return self._landing.reserved or min(self.promised.touched, self.total + 2 * ALIGNMENT)

    def begin(self, start: int, length: int) -> Slice:
        """Promise the bytes [start, start + length) to a socket that is about to deliver them."""
        self.promised.add(start, start + length)
        self._landing.expect(start, start + length)
        piece = Slice(self, start, self.view[start : start + length], 0, start)
        self.open.append(piece)
        return piece

    def finish(self, piece: Slice) -> bool:
        """All of `piece` has landed; true when that completes the message (W36)."""
        self.open.remove(piece)
        self.received += len(piece.view)
        return self.received == self.total


@dataclass(slots=True, eq=False)
class Slice:
    """A run of bytes that one socket is delivering.

    Attributes:
        start: its offset in the inner frame.
        view: where its bytes land.
        filled: how many have landed.
        scanned: offset up to which the owner has looked at them (`wire.scanning`).
    """

    partial: Partial
    start: int
    view: memoryview
    filled: int
    scanned: int


class Reassembler:
    """The partial messages of one group and direction (W28 to W36).

    Raises nothing but ProtocolError, and takes no memory that W32 does not allow.
    """

    def __init__(self, role: Role, inner_limit: int, pool: SlabPool | None = None) -> None:
        self.role = role
        self.inner_limit = inner_limit
        self.held = 0
        self._pool = pool or SlabPool()
        self._partials: dict[int, Partial] = {}
        self._whole: list[Partial] = []
        self._finished: deque[int] = deque()
        self._finished_set: set[int] = set()

    def __len__(self) -> int:
        return len(self._partials)

    def begin(self, msg_id: int, total: int, offset: int, length: int) -> Slice | None:
        """Find the place of a slice from its CHUNK header, before its body is read.

        Returns:
            Where the body goes; None when it must wait until a message completes (W32).

        Raises:
            ProtocolError: `chunk` (W29), `partial-limit` (W30) or `out-of-memory`.
        """
        partial = self._partials.get(msg_id)
        self._check(partial, msg_id, total, offset, length)
        if not self._admits(msg_id, _new_memory(partial, total, length)):
            return None
        if partial is None:
            partial = self._open(msg_id, total)
            self._partials[msg_id] = partial
            self.held += partial.held
        self.held -= partial.held
        piece = partial.begin(offset, length)
        self.held += partial.held
        return piece

    def begin_whole(self, total: int) -> Slice | None:
        """Room for a large frame outside CHUNKs, of `total` bytes with its header.

        It counts like the message that W32 reserves the outer zone for, so that the bound on a
        group's memory holds for frames and CHUNKs together. None: it must wait.
        """
        if self.held + total > 3 * self.inner_limit + SLACK_BYTES:
            return None
        partial = self._open(None, total)
        piece = partial.begin(0, total)
        self._whole.append(partial)
        self.held += partial.held
        return piece

    def finish(self, piece: Slice) -> Partial | None:
        """The body of `piece` has landed; the message it completes, if any."""
        partial = piece.partial
        if not partial.finish(piece):
            return None
        self.held -= partial.held
        if partial.msg_id is None:
            self._whole.remove(partial)
            return partial
        del self._partials[partial.msg_id]
        self._finished.append(partial.msg_id)
        self._finished_set.add(partial.msg_id)
        if len(self._finished) > FINISHED_IDS:
            self._finished_set.discard(self._finished.popleft())
        return partial

    def clear(self) -> None:
        """Drop everything partial (W34)."""
        self._partials.clear()
        self._whole.clear()
        self.held = 0

    def _open(self, msg_id: int | None, total: int) -> Partial:
        # Used memory is charged whole at once, so it is only taken where that changes nothing.
        recycled = self.held + total <= self.inner_limit + SLACK_BYTES
        lead = LEAD[self.role]
        return Partial(msg_id, total, Landing(total, lead, self._pool, recycled=recycled))

    def _check(
        self, partial: Partial | None, msg_id: int, total: int, offset: int, length: int
    ) -> None:
        if not FRAME_BYTES <= total <= self.inner_limit:
            raise _bad_chunk(
                f"total {total} of message {msg_id} is not in {FRAME_BYTES}..{self.inner_limit}"
            )
        if offset + length > total:
            raise _bad_chunk(f"slice {offset}+{length} of message {msg_id} passes its end {total}")
        if partial is None:
            if msg_id in self._finished_set:
                raise _bad_chunk(f"message {msg_id} is already complete")
            if len(self._partials) >= MAX_PARTIALS:
                raise ProtocolError(
                    ErrorCode.PARTIAL_LIMIT,
                    f"message {msg_id} would be the {MAX_PARTIALS + 1}th partial one",
                )
        elif partial.total != total:
            raise _bad_chunk(
                f"message {msg_id} announced {partial.total} bytes, now its total is {total}"
            )
        elif partial.promised.overlaps(offset, offset + length):
            raise _bad_chunk(f"slice {offset}+{length} of message {msg_id} came before")

    def _admits(self, msg_id: int, length: int) -> bool:
        after = self.held + length
        if after <= self.inner_limit + SLACK_BYTES:
            return True
        if msg_id > min(self._partials, default=msg_id):
            return False
        return after <= 3 * self.inner_limit + SLACK_BYTES


def _new_memory(partial: Partial | None, total: int, length: int) -> int:
    """Bytes that taking a slice adds: its own in a mapping, all of a small message at once."""
    if total >= MAPPED_FROM:
        return length
    return total if partial is None else 0


def _bad_chunk(sentence: str) -> ProtocolError:
    return ProtocolError(ErrorCode.CHUNK, sentence)
