"""The connection core: any split gives the same messages, any bytes only a protocol error."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.support import (
    chunk,
    chunks,
    connection,
    feed,
    frame,
    messages,
    normal,
    push,
    random_stream,
    session,
    tensor,
    valid_messages,
)
from wire.connection import PROGRESS_BYTES, BadBudget, FirstFrame, Progress, Received, tensor_region
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.frames import HELLO_LIMIT, READABLE, MessageType, Role
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.limits import Session
from wire.messages import (
    Broadcast,
    BudgetDone,
    DataHello,
    FinalAck,
    Heartbeat,
    InitParams,
    Shutdown,
    encode_frame,
)

ROLES = st.sampled_from(list(Role))


@given(ROLES, st.integers(0, 2**32), st.integers(0, 12))
@settings(max_examples=60)
def test_any_split_of_a_valid_stream_gives_the_same_messages(
    role: Role, seed: int, count: int
) -> None:
    rng = random.Random(seed)
    stream, expected = random_stream(role, rng, count)
    whole = messages(connection(session(role)), stream)
    pieces = messages(connection(session(role)), stream, rng)
    assert [normal(m) for m in whole] == [normal(m) for m in pieces]
    assert [normal(m) for m in whole] == [normal(m) for m in expected]


@given(ROLES, st.binary(max_size=300), st.integers(0, 2**32))
@settings(max_examples=200)
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(
    role: Role, raw: bytes, seed: int
) -> None:
    rng = random.Random(seed)
    stream, _ = random_stream(role, rng, 2)
    at = rng.randrange(len(stream) + 1)
    for data in (raw, stream[:at] + raw, stream[:at] + raw + stream[at:]):
        core = connection(session(role))
        with contextlib.suppress(ProtocolError):
            messages(core, data, rng)
        assert core._chunks.held <= core._chunks.inner_limit + 64 * 2**20


@given(ROLES, st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_flipped_byte_is_a_message_or_a_protocol_error(role: Role, seed: int) -> None:
    rng = random.Random(seed)
    stream = bytearray(random_stream(role, rng, 3)[0])
    stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
    with contextlib.suppress(ProtocolError):
        list(feed(connection(session(role)), bytes(stream), rng))


@pytest.mark.parametrize("role", list(Role))
def test_every_type_that_is_not_for_this_reader_is_a_fault(role: Role) -> None:
    """Section 3, W7: HELLO and DATA_HELLO never come again."""
    for code in (0, *range(1, 16), 255):
        if code in READABLE[role]:
            continue
        with pytest.raises(ProtocolError) as caught:
            messages(connection(session(role)), frame(code, b""))
        assert caught.value.code == "bad-type"


def test_w6_the_order_of_checks() -> None:
    """Magic, then type, then length; each from the header alone, before the payload."""
    cases = [
        (struct.pack("<IBQ", 1, 99, 2**60), "bad-magic"),
        (frame(99, b"", length=2**64 - 1), "bad-type"),
        (frame(MessageType.PUSH_FRAGMENT, b"", length=2**64 - 1), "too-long"),
        (frame(MessageType.PUSH_FRAGMENT, b"", length=47), "bad-length"),
        (frame(MessageType.HEARTBEAT, b"", length=13), "bad-length"),
        (frame(MessageType.HEARTBEAT, b"", length=11), "bad-length"),
        (frame(MessageType.FINAL_ACK, b"", length=0), "bad-length"),
        (frame(MessageType.CHUNK, b"", length=24), "bad-length"),
        (frame(MessageType.CHUNK, b"", length=4_194_329), "too-long"),
    ]
    for raw, code in cases:
        with pytest.raises(ProtocolError) as caught:
            messages(connection(session()), raw)
        assert caught.value.code == code


def test_w8_trailing_bytes_in_an_exact_payload() -> None:
    with pytest.raises(ProtocolError) as caught:
        messages(connection(session(Role.LEARNER)), frame(MessageType.SHUTDOWN, b"\0"))
    assert caught.value.code == "bad-length"


def test_a_burst_of_small_frames_needs_few_reads() -> None:
    """1,000 control messages pass through staging, hundreds at a time."""
    core = connection(session())
    stream = encode_frame(Heartbeat(0, 1)) * 1000
    reads = 0
    got = 0
    view = memoryview(stream)
    while view:
        room = core.get_buffer()
        count = min(len(room), len(view))
        room[:count] = view[:count]
        view = view[count:]
        reads += 1
        assert core.buffer_updated(count)
        while core.next_event() is not None:
            got += 1
    assert got == 1000
    assert reads <= 3


BIG = NumericLayout((numeric_fragment(MergeMode.AVG, [3_000_000]),))


def test_a_body_lands_in_the_message_itself() -> None:
    """After the header, the core asks for the rest of a slice in one piece, and hands that out."""
    core = connection(session(layout=BIG))
    inner = encode_frame(push(0, data=tensor(0, layout=BIG)))
    first = chunk(3, inner, 0, 4_000_000)
    head = core.get_buffer()
    head[:1000] = first[:1000]
    core.buffer_updated(1000)
    assert core.next_event() is None
    place = core.get_buffer()
    assert len(place) == core.expected == len(first) - 1000
    place[:] = first[1000:]
    assert not core.buffer_updated(1000)
    assert core.next_event() is None
    assert core.buffer_updated(PROGRESS_BYTES)
    assert isinstance(core.next_event(), Progress)
    assert core.next_event() is None
    assert core.buffer_updated(core.expected)
    assert isinstance(core.next_event(), Progress)
    assert core.next_event() is None
    assert core.expected == 0
    events = list(feed(core, b"".join(chunks(3, inner, [4_000_000, 8_000_000])[1:])))
    assert isinstance(events[-1], Received)
    message = events[-1].message
    assert isinstance(message.tensor, memoryview)
    assert bytes(message.tensor) == tensor(0, layout=BIG)
    assert message.tensor.obj is place.obj
    assert not message.tensor.readonly  # codecs and compiled loops use it in place


def test_a_large_frame_outside_chunks_lands_in_place_too() -> None:
    """P1: with S = 0 a peer sends PUSH as one frame."""
    core = connection(session(layout=BIG))
    data = encode_frame(push(0, data=tensor(0, layout=BIG)))
    first, second = messages(core, data + encode_frame(Heartbeat(0, 2)))
    assert bytes(first.tensor) == tensor(0, layout=BIG)
    assert second == Heartbeat(0, 2)


# -- section 8: CHUNK faults -------------------------------------------------------------------

PUSH = encode_frame(push(0))


def fault(stream: bytes, role: Role = Role.SYNCER, **options: bool) -> str:
    with pytest.raises(ProtocolError) as caught:
        messages(connection(session(role), **options), stream)
    return str(caught.value.code)


def test_w29_totals_and_offsets() -> None:
    limit = session().inner_limit
    assert fault(chunk(0, PUSH, 0, 5, total=12)) == "chunk"
    assert fault(chunk(0, PUSH, 0, 5, total=limit + 1)) == "chunk"
    assert fault(chunk(0, PUSH, 0, 5, total=2**64 - 1)) == "chunk"
    assert fault(chunk(0, PUSH, 100, 20, total=110)) == "chunk"
    header = struct.pack("<QQQ", 0, 100, 2**64 - 1)
    assert fault(frame(MessageType.CHUNK, header + b"xx")) == "chunk"
    assert fault(chunk(0, PUSH, 0, 5) + chunk(0, PUSH, 5, 5, total=len(PUSH) - 1)) == "chunk"


def test_w29_any_byte_twice() -> None:
    first = chunk(0, PUSH, 10, 10)
    for start, length in ((10, 10), (5, 6), (19, 1), (0, 40), (12, 2)):
        assert fault(first + chunk(0, PUSH, start, length)) == "chunk"


def test_w29_a_finished_id() -> None:
    whole = chunk(7, PUSH, 0, len(PUSH))
    assert fault(whole + chunk(7, PUSH, 0, 1)) == "chunk"
    later = b"".join(chunk(8 + i, PUSH, 0, len(PUSH)) for i in range(256))
    assert len(messages(connection(session()), whole + later + whole)) == 258


def test_w30_the_65th_partial_message() -> None:
    opened = b"".join(chunk(i, PUSH, 0, 1) for i in range(64))
    core = connection(session())
    assert messages(core, opened) == []
    with pytest.raises(ProtocolError) as caught:
        messages(core, chunk(64, PUSH, 0, 1))
    assert caught.value.code == "partial-limit"


def test_w31_the_completed_message() -> None:
    def chunked(inner: bytes) -> bytes:
        return chunk(0, inner, 0, len(inner))

    assert fault(chunked(b"\0" + PUSH[1:])) == "chunk"
    assert fault(chunked(PUSH + b"\0")) == "chunk"
    assert fault(chunked(frame(MessageType.PULL_REQ, bytes(16)))) == "chunk"
    assert fault(chunked(frame(MessageType.HELLO, bytes(16)))) == "chunk"
    assert fault(chunked(encode_frame(DataHello(0, 1, 0)))) == "chunk"
    assert fault(chunked(chunk(1, PUSH, 0, 5))) == "chunk"
    assert fault(chunked(frame(MessageType.HEARTBEAT, bytes(11)))) == "bad-length"
    assert fault(chunked(encode_frame(push(0, attempt=0)))) == "attempt"


def test_w28_a_control_message_inside_chunks() -> None:
    for role, message in ((Role.SYNCER, FinalAck(4)), (Role.LEARNER, Shutdown())):
        inner = encode_frame(message)
        stream = b"".join(reversed(chunks(0, inner, [3, 9])))
        assert messages(connection(session(role)), stream) == [message]


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_w28_one_byte_slices_in_any_order(seed: int) -> None:
    parts = [chunk(0, PUSH, at, 1) for at in range(len(PUSH))]
    random.Random(seed).shuffle(parts)
    assert [normal(m) for m in messages(connection(session()), b"".join(parts))] == [
        normal(push(0))
    ]


def test_messages_of_several_sockets_share_partials() -> None:
    """Slices of one message come over different sockets of the group."""
    one = connection(session())
    two = type(one)(session(), one._chunks)
    parts = chunks(0, PUSH, [30, 60])
    assert messages(one, parts[0]) == []
    assert messages(two, parts[2]) == []
    assert [normal(m) for m in messages(one, parts[1])] == [normal(push(0))]


# -- budget ------------------------------------------------------------------------------------


def test_c75_a_malformed_budget_report() -> None:
    for bad in (frame(MessageType.BUDGET_DONE, bytes(9)), frame(MessageType.BUDGET_DONE, b"")):
        assert fault(bad) == "bad-length"
        events = list(feed_until(bad))
        assert events == [BadBudget()]
        inside = chunk(0, bad, 0, len(bad))
        assert list(feed_until(inside)) == [BadBudget()]
    good = encode_frame(BudgetDone(5))
    assert messages(connection(session(), report_bad_budget=True), good) == [BudgetDone(5)]


def feed_until(data: bytes) -> list:
    core = connection(session(), report_bad_budget=True)
    core.get_buffer()[: len(data)] = data
    core.buffer_updated(len(data))
    return [core.next_event()]


# -- scanning while it arrives -----------------------------------------------------------------


def test_tensor_region_is_known_once_the_head_is_there() -> None:
    for role, message, start in (
        (Role.SYNCER, push(0, data=tensor(0, layout=BIG)), 61),
        (Role.SYNCER, InitParams(0, tensor(0, layout=BIG)), 17),
        (Role.LEARNER, Broadcast(0, 1, tensor(0, layout=BIG)), 25),
    ):
        which: Session = session(role, layout=BIG)
        core = connection(which)
        inner = encode_frame(message)
        tail, head = chunk(0, inner, 100, 1000), chunk(0, inner, 0, 100)
        (event,) = feed(core, tail)
        partial = event.piece.partial
        assert tensor_region(which, partial) is None
        (event,) = feed(core, head)
        assert event.piece.partial is partial
        assert tensor_region(which, partial) == (DType.F32, start)
        assert partial.prefix == 1100


def test_tensor_region_of_a_wrong_head_is_left_to_completion() -> None:
    which = session(layout=BIG)
    for message in (push(0, learner=3, data=tensor(0, layout=BIG)),):
        (event,) = feed(connection(which), chunk(0, encode_frame(message), 0, 100))
        assert tensor_region(which, event.piece.partial) is None


# -- the first frame ---------------------------------------------------------------------------


def first(data: bytes, splits: random.Random | None = None) -> tuple[MessageType, bytes, int]:
    """Feed a FirstFrame; what it read, and how many bytes it left."""
    core = FirstFrame()
    at = 0
    while True:
        room = core.get_buffer()
        count = min(len(room), len(data) - at)
        if splits is not None:
            count = splits.randint(1, count)
        room[:count] = data[at : at + count]
        at += count
        if core.buffer_updated(count):
            kind, payload = core.take()
            return kind, bytes(payload), len(data) - at


@given(st.integers(1, 200_000), st.integers(0, 2**32))
@settings(max_examples=20)
def test_w14_the_first_frame_takes_not_one_byte_more(size: int, seed: int) -> None:
    hello = frame(MessageType.HELLO, random.Random(seed).randbytes(size))
    kind, payload, left = first(hello + b"next")
    assert (kind, payload, left) == (MessageType.HELLO, hello[13:], 4)


def test_w7_limits_of_the_first_frame() -> None:
    cases = [
        (frame(MessageType.HELLO, b"", length=HELLO_LIMIT + 1), "too-long"),
        (frame(MessageType.DATA_HELLO, b"", length=15), "bad-length"),
        (frame(MessageType.DATA_HELLO, b"", length=17), "bad-length"),
        (frame(MessageType.PUSH_FRAGMENT, bytes(60)), "bad-type"),
        (frame(MessageType.CHUNK, bytes(60)), "bad-type"),
        (b"GET / HTTP/1.1\r\n", "bad-magic"),
    ]
    for raw, code in cases:
        with pytest.raises(ProtocolError) as caught:
            first(raw, random.Random(1))
        assert caught.value.code == code


def test_an_empty_hello_is_its_readers_to_refuse() -> None:
    """S2: with a key by its missing mac, which comes before any other rule."""
    assert first(frame(MessageType.HELLO, b"")) == (MessageType.HELLO, b"", 0)


def test_w6_a_header_alone_takes_no_memory() -> None:
    core = FirstFrame()
    header = frame(MessageType.HELLO, b"", length=HELLO_LIMIT)
    core.get_buffer()[:] = header
    assert not core.buffer_updated(13)
    assert len(core.get_buffer()) <= 65_536


@pytest.mark.parametrize("role", list(Role))
def test_every_legal_message_is_read(role: Role) -> None:
    for message in valid_messages(role):
        (got,) = messages(connection(session(role)), encode_frame(message))
        assert normal(got) == normal(message)
