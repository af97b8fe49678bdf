"""One socket's protocol core: bytes in, messages out, no I/O (W6 to W11, W28 to W31).

Two phases, two classes:

    FirstFrame    accept .. first frame complete     HELLO or DATA_HELLO only (W7)
    Connection    member of a group                  what the role may read (section 4)

A shell asks `get_buffer` where the next bytes go, reads into it, says how many with
`buffer_updated`, then takes events until there are none. Frames that fit pass through a small
staging buffer, many at a time; longer bodies land directly in the message's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wire.chunks import Partial, Reassembler, Slice
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.frames import (
    BULK_TYPES,
    CHUNK_BYTES,
    CHUNK_HEADER,
    DATA_HELLO_BYTES,
    FRAME_BYTES,
    FRAME_HEADER,
    HELLO_LIMIT,
    MAGIC,
    READABLE,
    MessageType,
)
from wire.limits import Session
from wire.messages import BUDGET_BYTES, Message, decode_payload

STAGING_BYTES = 16 * 1024
"""Frames up to this size are read together; also the most that is ever copied of a longer one."""
PROGRESS_BYTES = 1024 * 1024
"""How much of a slice lands before its owner hears of it: each time costs as much as copying
some 200 KiB."""
FREE_HELLO_BYTES = 64 * 1024
"""What a first frame may take of memory without asking."""


class Core(Protocol):
    """What a stream shell needs of either phase."""

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""

    def buffer_updated(self, count: int) -> bool:
        """`count` >= 1 bytes were put there; true when there may be something to take."""

    @property
    def expected(self) -> int:
        """Bytes that the peer has announced and that can wait to be read together."""


@dataclass(slots=True)
class Received:
    """A whole message that passed W11, except the finiteness of its tensor.

    Its tensor is writable memory that nobody else refers to, so that codecs and compiled loops can
    use it in place.

    Attributes:
        source: the reassembled frame it lies in, None for one that came through staging.
    """

    message: Message
    source: Partial | None


@dataclass(frozen=True, slots=True)
class Progress:
    """More of a slice of a large message has landed."""

    piece: Slice


@dataclass(frozen=True, slots=True)
class BadBudget:
    """BUDGET_DONE of a wrong length, where the owner wants to hear of it (C75)."""


Event = Received | Progress | BadBudget


class FirstFrame:
    """Reads exactly the first frame of a socket and not one byte more (W7, W14).

    Args:
        gated: `buffer_updated` is true once more, when `FREE_HELLO_BYTES` of a longer payload have
            come: the owner decides when the rest may take memory.

    Attributes:
        header: its first 13 bytes, as far as they have come.
    """

    def __init__(self, *, gated: bool = False) -> None:
        self.header = bytearray(FRAME_BYTES)
        self._gated = gated
        self._body = bytearray()
        self._filled = 0
        self._kind: MessageType | None = None
        self._length = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes go."""
        if self._kind is None:
            return memoryview(self.header)[self._filled :]
        if self._filled == len(self._body):
            # Memory grows with what has come: a header alone takes nothing (W6).
            grown = max(FREE_HELLO_BYTES, 2 * self._filled)
            body = bytearray(min(grown, self._length))
            body[: self._filled] = self._body
            self._body = body
        return memoryview(self._body)[self._filled :]

    def buffer_updated(self, count: int) -> bool:
        """Account for `count` bytes; true once the frame is complete (and see `gated`).

        Raises:
            ProtocolError: `bad-magic`, `bad-type`, `too-long` or `bad-length`.
        """
        self._filled += count
        if self._kind is None:
            if self._filled < FRAME_BYTES:
                return False
            self._kind, self._length = _first_header(self.header)
            self._filled = 0
        return self.complete or (self._gated and self._filled == FREE_HELLO_BYTES)

    @property
    def expected(self) -> int:
        """None: what a stranger sends is looked at as it comes."""
        return 0

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        return self._kind is not None and self._filled == self._length

    @property
    def length(self) -> int:
        """Bytes of its payload, as announced; 0 before the header is complete."""
        return self._length

    def take(self) -> tuple[MessageType, memoryview]:
        """The complete frame: HELLO or DATA_HELLO, and its payload, which is not kept here."""
        if self._kind is None or not self.complete:
            raise ValueError("the first frame is not complete")
        body, self._body = self._body, bytearray()
        return self._kind, memoryview(body)


def _first_header(header: bytearray) -> tuple[MessageType, int]:
    magic, kind, length = FRAME_HEADER.unpack(header)
    _check_magic(magic)
    if kind == MessageType.DATA_HELLO:
        if length != DATA_HELLO_BYTES:
            raise ProtocolError(
                ErrorCode.BAD_LENGTH, f"DATA_HELLO announces {length} bytes, expected 16"
            )
    elif kind != MessageType.HELLO:
        raise ProtocolError(ErrorCode.BAD_TYPE, f"type {kind} cannot be the first frame")
    elif length > HELLO_LIMIT:
        raise ProtocolError(
            ErrorCode.TOO_LONG, f"HELLO announces {length} bytes, at most {HELLO_LIMIT} are legal"
        )
    return MessageType(kind), length


class Connection:
    """One established socket of a group; its partial messages are shared by the whole group.

    Attributes:
        blocked: a slice must wait until a message completes (W32); call `next_event` again then,
            and do not read before.
    """

    def __init__(
        self, session: Session, chunks: Reassembler, *, report_bad_budget: bool = False
    ) -> None:
        self.blocked = False
        self._session = session
        self._chunks = chunks
        self._readable = {
            int(kind): (kind, *session.payload_limits[kind]) for kind in READABLE[session.role]
        }
        self._report_bad_budget = report_bad_budget
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = 0
        self._end = 0
        self._piece: Slice | None = None
        self._reported = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes go: a message's memory, or staging."""
        piece = self._piece
        if piece is not None:
            return piece.view[piece.filled :]
        if self._start == self._end:  # as a rule: whole frames came
            self._start = self._end = 0
            return self._staging
        if self._start:
            rest = bytes(self._staging[self._start : self._end])
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._staging[self._end :]

    def buffer_updated(self, count: int) -> bool:
        """Account for `count` bytes; false when they are part of a body that goes on."""
        piece = self._piece
        if piece is None:
            self._end += count
            return True
        piece.filled += count
        return piece.filled == len(piece.view) or piece.filled - self._reported >= PROGRESS_BYTES

    @property
    def expected(self) -> int:
        """Bytes that the body being read still lacks."""
        piece = self._piece
        return 0 if piece is None else len(piece.view) - piece.filled

    def next_event(self) -> Event | None:
        """The next event, or None when more bytes (or memory, see `blocked`) are needed.

        Raises:
            ProtocolError: the peer broke a rule; nothing may be read from this socket afterwards.
        """
        self.blocked = False
        while True:
            piece = self._piece
            if piece is not None:
                if self._has_news(piece):
                    self._reported = piece.filled
                    return Progress(piece)
                if piece.filled < len(piece.view):
                    return None
                self._piece = None
                whole = self._chunks.finish(piece)
                if whole is not None:
                    return self._complete(whole)
                continue
            if self._end - self._start < FRAME_BYTES:
                return None
            magic, code, length = FRAME_HEADER.unpack_from(self._staging, self._start)
            if magic != MAGIC or code not in self._readable:
                raise _unreadable(magic, code)
            kind, least, most = self._readable[code]
            if not least <= length <= most:
                if self._is_bad_budget(kind, length):
                    return BadBudget()
                self._session.check_length(kind, length)
            if kind is MessageType.CHUNK:
                if not self._open_slice(length):
                    return None
            elif FRAME_BYTES + length > STAGING_BYTES:
                if not self._open_whole(length):
                    return None
            elif self._end - self._start < FRAME_BYTES + length:
                return None
            else:
                return self._staged(kind, length)

    def _is_bad_budget(self, kind: MessageType, length: int) -> bool:
        return (
            kind is MessageType.BUDGET_DONE and self._report_bad_budget and length != BUDGET_BYTES
        )

    def _open_slice(self, length: int) -> bool:
        at = self._start + FRAME_BYTES
        if self._end - at < CHUNK_BYTES:
            return False
        msg_id, total, offset = CHUNK_HEADER.unpack_from(self._staging, at)
        piece = self._chunks.begin(msg_id, total, offset, length - CHUNK_BYTES)
        if piece is None:
            self.blocked = True
            return False
        self._start = at + CHUNK_BYTES
        self._land(piece)
        return True

    def _open_whole(self, length: int) -> bool:
        piece = self._chunks.begin_whole(FRAME_BYTES + length)
        if piece is None:
            self.blocked = True
            return False
        self._land(piece)
        return True

    def _land(self, piece: Slice) -> None:
        """Move what staging holds of a body to its place; the rest is read there directly."""
        count = min(self._end - self._start, len(piece.view))
        piece.view[:count] = self._staging[self._start : self._start + count]
        piece.filled = count
        self._start += count
        self._piece = piece
        self._reported = 0

    def _has_news(self, piece: Slice) -> bool:
        news = piece.filled - self._reported
        if piece.filled < len(piece.view):
            return news >= PROGRESS_BYTES
        return news > 0 and piece.partial.total > STAGING_BYTES

    def _staged(self, kind: MessageType, length: int) -> Received:
        at = self._start + FRAME_BYTES
        payload = self._staging[at : at + length]
        if kind in BULK_TYPES:  # its tensor stays, and is nobody else's
            payload = memoryview(bytearray(payload))
        self._start = at + length
        return self._checked(kind, payload, None)

    def _complete(self, partial: Partial) -> Event:
        magic, code, length = FRAME_HEADER.unpack_from(partial.view)
        if partial.msg_id is not None:
            self._check_inner(partial, magic, code, length)
        kind = MessageType(code)
        if self._is_bad_budget(kind, length):
            return BadBudget()
        self._session.check_length(kind, length)
        return self._checked(kind, partial.view[FRAME_BYTES:], partial)

    def _check_inner(self, partial: Partial, magic: int, code: int, length: int) -> None:
        """W31: what a completed message must begin with."""
        if magic != MAGIC:
            problem = f"begins with {magic:#x}, not the frame magic"
        elif length != partial.total - FRAME_BYTES:
            problem = f"has {partial.total} bytes but says {length} after its header"
        elif code == MessageType.CHUNK or code not in self._readable:
            problem = f"is of type {code}, which is not legal in CHUNKs here"
        else:
            return
        raise ProtocolError(ErrorCode.CHUNK, f"reassembled message {partial.msg_id} {problem}")

    def _checked(self, kind: MessageType, payload: memoryview, source: Partial | None) -> Received:
        message = decode_payload(kind, payload)
        self._session.check(message)
        return Received(message, source)


def tensor_region(session: Session, partial: Partial) -> tuple[DType, int] | None:
    """Wire dtype of a partial message's tensor and where it begins in the inner frame.

    Lets a tensor be scanned while it arrives. None when the head has not landed, when there is no
    tensor, or when the head is wrong, which `Connection` reports at completion (W31).
    """
    if partial.prefix < min(partial.total, FRAME_BYTES + 64):
        return None
    magic, code, length = FRAME_HEADER.unpack_from(partial.view)
    if magic != MAGIC or length != partial.total - FRAME_BYTES or code not in BULK_TYPES:
        return None
    if code not in READABLE[session.role]:
        return None
    try:
        message = decode_payload(MessageType(code), partial.view[FRAME_BYTES:])
        session.check(message)
    except ProtocolError:
        return None
    dtype = session.tensor_dtype(message)
    if dtype is None:
        return None
    tensor = memoryview(getattr(message, "tensor", b""))
    return dtype, partial.total - tensor.nbytes


def _check_magic(magic: int) -> None:
    if magic != MAGIC:
        raise ProtocolError(ErrorCode.BAD_MAGIC, f"a frame begins with {magic:#x}, not {MAGIC:#x}")


def _unreadable(magic: int, code: int) -> ProtocolError:
    _check_magic(magic)
    return ProtocolError(ErrorCode.BAD_TYPE, f"type {code} is not legal here")
