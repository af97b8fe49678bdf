"""The byte-level core of a group's sockets: frames, CHUNKs, typed messages (W6-W11, W28-W36).

Input: a mode byte (bit 0: the learner reads; bits 1 and 2: dtype; bit 3: malformed BUDGET_DONE is
reported; bit 4: the id is 0), then pieces: a byte (bits 0 and 1: which of three sockets; bits 2 to
7: n), then 8 n + 1 bytes that this socket delivers.
"""

from __future__ import annotations

from fuzz.targets import Reader
from wire.chunks import MAX_PARTIALS, SLACK_BYTES, Reassembler
from wire.connection import BadBudget, Connection, Received, tensor_region
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.frames import FRAME_BYTES, MessageType, Role
from wire.layout import parse_layout
from wire.limits import Session
from wire.messages import ErrorMessage, encode_frame

LAYOUT = parse_layout(
    memoryview(
        bytes.fromhex(
            "0001000000"
            "0500000000000000"
            "0202000000"
            "04000000000000000600000000000000"
            "0200000000000000020000000000000002000000000000000300000000000000"
        )
    ),
    2,
)[0]
"""Two fragments of 5 and 10 elements."""


def one_input(data: bytes) -> None:
    """Deliver the pieces until the input ends or a rule is broken."""
    reader = Reader(data)
    mode = reader.byte()
    role = Role.LEARNER if mode & 1 else Role.SYNCER
    dtype = DType(1 + (mode >> 1 & 3) % 3)
    session = Session(role, LAYOUT, dtype, 0 if mode & 16 else 1)
    chunks = Reassembler(role, session.inner_limit)
    sockets = [Connection(session, chunks, report_bad_budget=bool(mode & 8)) for _ in range(3)]
    fed = taken = 0
    try:
        while reader:
            control = reader.byte()
            piece = reader.take(8 * (control >> 2) + 1)
            fed += len(piece)
            came = _deliver(session, sockets[control % 4 % 3], piece)
            if came is None:
                break
            taken += came
            assert taken <= fed, "a message is never larger than what came"
            assert len(chunks) <= MAX_PARTIALS
            assert 0 <= chunks.held <= 3 * session.inner_limit + SLACK_BYTES
    except ProtocolError as error:
        assert len(error.text.encode()) <= 1024
    chunks.clear()
    assert chunks.held == 0


def _deliver(session: Session, core: Connection, piece: bytes) -> int | None:
    """Bytes of the whole messages that came out; None once the run is over (C75)."""
    taken = 0
    while piece:
        buffer = core.get_buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(piece))
        buffer[:count] = piece[:count]
        piece = piece[count:]
        if not core.buffer_updated(count):
            continue
        while (event := core.next_event()) is not None:
            if isinstance(event, Received):
                taken += _check(session, event)
            elif isinstance(event, BadBudget):
                return None
            else:
                tensor_region(session, event.piece.partial)
        assert not core.blocked, "W32 cannot bite with fragments this small"
    return taken


def _check(session: Session, event: Received) -> int:
    """Bytes of its frame, at least: the text of an ERROR may have been mended on arrival."""
    if isinstance(event.message, ErrorMessage):
        return FRAME_BYTES
    frame = encode_frame(event.message)
    kind = MessageType(frame[4])
    assert kind in session.payload_limits
    session.check_length(kind, len(frame) - FRAME_BYTES)
    session.check(event.message)
    return len(frame)
