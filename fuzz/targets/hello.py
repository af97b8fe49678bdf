"""The first frame of a socket: HELLO and DATA_HELLO, sealed or not (W6-W8, W12, S1, S2).

Input: a mode byte (bit 0: the syncer has a key; bit 1: seal the HELLO with it; bits 2 to 7: how
many bytes the socket delivers at once), then the frame.
"""

from __future__ import annotations

from fuzz.targets import Reader
from wire.connection import FirstFrame
from wire.errors import ErrorCode, ProtocolError
from wire.frames import FRAME_BYTES, FRAME_HEADER, HELLO_LIMIT, MessageType, Role
from wire.layout import parse_layout
from wire.limits import LIMIT_CEILING, Session, check_limits_fit
from wire.messages import DataHello, decode_data_hello, encode_frame, encode_hello
from wire.security import MAC_BYTES, AuthKey, open_hello, seal

LEARNERS = 3
KEY = AuthKey(bytes(range(32)))


def one_input(data: bytes) -> None:
    """Read one first frame in pieces, then all it says."""
    reader = Reader(data)
    mode = reader.byte()
    frame = reader.take(len(data))
    if mode & 2 and frame[4:5] == bytes([MessageType.HELLO]):
        sealed = seal(KEY, frame[FRAME_BYTES:])
        frame = FRAME_HEADER.pack(0xD170C0DE, MessageType.HELLO, len(sealed)) + sealed
    try:
        found = _first_frame(frame, 1 + (mode >> 2) * 7)
        if found is None:
            return
        kind, payload = found
        if kind is MessageType.HELLO:
            _hello(payload, keyed=bool(mode & 1))
        else:
            _data_hello(payload)
    except ProtocolError as error:
        assert error.text.startswith(f"{error.code}: ")
        assert len(error.text.encode()) <= 1024
        assert KEY.secret.hex() not in error.text


def _first_frame(frame: bytes, step: int) -> tuple[MessageType, memoryview] | None:
    core = FirstFrame()
    at = 0
    while at < len(frame):
        buffer = core.get_buffer()
        assert 0 < len(buffer) <= max(65_536, 2 * at), "memory grows with what has come (W6)"
        piece = frame[at : at + min(step, len(buffer))]
        buffer[: len(piece)] = piece
        at += len(piece)
        if core.buffer_updated(len(piece)):
            kind, payload = core.take()
            assert at == FRAME_BYTES + len(payload), "not one byte past the first frame (W14)"
            assert bytes(payload) == frame[FRAME_BYTES:at]
            assert len(payload) <= HELLO_LIMIT
            return kind, payload
    return None


def _hello(payload: memoryview, *, keyed: bool) -> None:
    hello = open_hello([KEY] if keyed else [], payload, LEARNERS)
    body = bytes(payload[:-MAC_BYTES] if keyed else payload)
    assert not keyed or seal(KEY, body) == payload
    assert encode_hello(hello) == body
    assert hello.learner_id < LEARNERS
    assert hello.generation
    assert hello.num_streams <= 256
    assert parse_layout(memoryview(hello.layout.encode()), len(hello.layout))[0] == hello.layout
    check_limits_fit(hello.layout, hello.dtype)
    for role in Role:
        session = Session(role, hello.layout, hello.dtype, hello.learner_id)
        for least, most in session.payload_limits.values():
            assert 0 <= least <= most < LIMIT_CEILING


def _data_hello(payload: memoryview) -> None:
    try:
        message = decode_data_hello(payload, LEARNERS)
    except ProtocolError as error:
        assert error.code in (ErrorCode.VERSION, ErrorCode.LEARNER_ID, ErrorCode.GENERATION)
        raise
    assert isinstance(message, DataHello)
    assert encode_frame(message)[FRAME_BYTES:] == payload
