"""Messages, their limits and the checks of a body (sections 3 to 5)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.support import (
    LAYOUT,
    LEARNER_MESSAGES,
    SYNCER_MESSAGES,
    normal,
    push,
    session,
    tensor,
)
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError, clip_utf8
from wire.frames import MAGIC, READABLE, MessageType, Role
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.limits import Session, check_limits_fit
from wire.messages import (
    Broadcast,
    ErrorMessage,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    Hello,
    InitParams,
    Message,
    PullRequest,
    decode_data_hello,
    decode_hello,
    decode_payload,
    encode_frame,
    encode_hello,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ALL = [*SYNCER_MESSAGES, *LEARNER_MESSAGES, ErrorMessage("stopped: bye")]


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_every_message_survives(message: Message) -> None:
    frame = encode_frame(message)
    assert frame[:4] == bytes.fromhex("dec070d1")
    kind = MessageType(frame[4])
    assert int.from_bytes(frame[5:13], "little") == len(frame) - 13
    assert normal(decode_payload(kind, memoryview(frame)[13:])) == normal(message)


@given(u32, u64, u32)
def test_pull_survives(fragment: int, step: int, attempt: int) -> None:
    pull = PullRequest(fragment, step, attempt)
    assert decode_payload(MessageType.PULL_REQ, memoryview(encode_frame(pull)[13:])) == pull


@given(st.integers(0, 40), st.sampled_from(sorted(MessageType)))
def test_any_payload_is_a_message_or_a_protocol_error(size: int, kind: MessageType) -> None:
    if kind in (MessageType.HELLO, MessageType.DATA_HELLO, MessageType.CHUNK):
        return
    with contextlib.suppress(ProtocolError):
        message = decode_payload(kind, memoryview(bytes(size)))
        assert len(encode_frame(message)) == 13 + size


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_a_payload_that_is_too_short_or_long_is_refused(message: Message) -> None:
    """W8: exact sizes from the header alone, trailing bytes never."""
    role = Role.SYNCER if message in SYNCER_MESSAGES else Role.LEARNER
    kind = MessageType(encode_frame(message)[4])
    least, most = session(role).payload_limits[kind]
    for length in (least - 1, most + 1, 2**63):
        if length < 0:
            continue
        with pytest.raises(ProtocolError) as caught:
            session(role).check_length(kind, length)
        assert caught.value.code in ("bad-length", "too-long")


def test_the_table_of_section_4() -> None:
    """F = 3, largest fragment 301 values."""
    f32 = session(Role.SYNCER).payload_limits
    assert f32[MessageType.INIT_PARAMS][1] == 4 + 4 * 301
    assert f32[MessageType.PUSH_FRAGMENT][1] == 48 + 4 * 301
    q4 = session(Role.SYNCER, DType.Q4).payload_limits
    assert q4[MessageType.INIT_PARAMS][1] == 4 + 2 * 301
    assert q4[MessageType.PUSH_FRAGMENT][1] == 48 + 132 * 2
    learner = session(Role.LEARNER, DType.BF16).payload_limits
    assert learner[MessageType.BCAST_FRAGMENT][1] == 12 + 2 * 301
    assert learner[MessageType.FINAL_FRAGMENT][1] == 12 + 4 * 301
    assert learner[MessageType.FINAL_MANIFEST] == (38, 38)
    assert learner[MessageType.ERROR][1] == 65_536
    assert learner[MessageType.CHUNK] == (25, 4_194_328)
    assert session(Role.SYNCER, DType.Q4).inner_limit == 13 + max(4 + 602, 48 + 264)
    assert session(Role.LEARNER, DType.BF16).inner_limit == 13 + 12 + 4 * 301
    assert set(f32) == READABLE[Role.SYNCER]
    assert set(learner) == READABLE[Role.LEARNER]


SHORT = tensor(0)[:-1]


@pytest.mark.parametrize(
    ("role", "message", "code"),
    [
        (Role.SYNCER, InitParams(3, tensor(0)), "bad-fragment"),
        (Role.SYNCER, InitParams(0, SHORT), "bad-length"),
        (Role.SYNCER, push(3, data=tensor(0)), "bad-fragment"),
        (Role.SYNCER, push(1, data=tensor(0)), "bad-length"),
        (Role.SYNCER, push(0, learner=9), "identity"),
        (Role.SYNCER, push(0, attempt=0), "attempt"),
        (Role.SYNCER, push(0, c_steps=0), "attempt"),
        (Role.SYNCER, Heartbeat(9, 1), "identity"),
        (Role.LEARNER, Broadcast(3, 1, tensor(0)), "bad-fragment"),
        (Role.LEARNER, FinalFragment(0, 1, SHORT), "bad-length"),
        (Role.LEARNER, PullRequest(3, 1, 1), "bad-fragment"),
        (Role.LEARNER, PullRequest(0, 1, 0), "attempt"),
        (Role.LEARNER, FinalManifest(1, (1, 2)), "bad-fragment"),
    ],
)
def test_w11(role: Role, message: Message, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        session(role).check(message)
    assert caught.value.code == code


def test_only_learner_0_initializes() -> None:
    with pytest.raises(ProtocolError) as caught:
        session(learner=2).check(InitParams(0, tensor(0)))
    assert caught.value.code == "init-forbidden"


# -- HELLO -------------------------------------------------------------------------------------

HELLO = Hello(5, 77, DType.BF16, LAYOUT, b"f" * 32, b"c" * 32, None, 4)


def refused(payload: bytes, learners: int = 8) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode_hello(memoryview(payload), learners)
    return str(caught.value.code)


def changed(at: int, value: bytes) -> bytes:
    payload = bytearray(encode_hello(HELLO))
    payload[at : at + len(value)] = value
    return bytes(payload)


def test_w12_order_and_codes() -> None:
    """Each step is reached only when the ones before it pass."""
    assert refused(changed(0, b"\3\0" + b"\xff" * 20)) == "version"
    assert refused(changed(2, (8).to_bytes(4, "little") + bytes(8))) == "learner-id"
    assert refused(changed(6, bytes(8) + b"\0")) == "generation"
    assert refused(changed(14, b"\0" + b"\xff" * 4)) == "dtype"
    assert refused(changed(14, b"\4")) == "dtype"
    assert refused(changed(15, bytes(4))) == "layout"
    assert refused(changed(15, b"\xff" * 4)) == "layout"
    assert refused(encode_hello(HELLO)[:-1]) == "hello-tail"
    assert refused(encode_hello(HELLO) + b"\0" * 33) == "hello-tail"
    assert refused(encode_hello(HELLO)[:-2] + (257).to_bytes(2, "little")) == "num-streams"
    with_profile = encode_hello(HELLO)[:-2] + b"p" * 32 + b"\0\1"
    assert decode_hello(memoryview(with_profile), 8).profile == b"p" * 32


@pytest.mark.parametrize(
    ("fragment", "where"),
    [
        (numeric_fragment(MergeMode.AVG, [0]), 'a tensor without elements'),
        (numeric_fragment(MergeMode.AVG, [2**62, 2**62]), "2^63"),
        (numeric_fragment(MergeMode.ISO, [6], [(2, 4)]), "not 6 elements"),
        (numeric_fragment(MergeMode.ISO, [2**40], [(2**52, 2**52)]), "elements"),
        (numeric_fragment(MergeMode.ISO, [1], [(0, 0)]), "elements"),
    ],
)  # fmt: skip
def test_w12_step_6(fragment: object, where: str) -> None:
    layout = NumericLayout((LAYOUT.fragments[0], fragment))  # type: ignore[arg-type]
    payload = encode_hello(Hello(5, 77, DType.F32, layout, b"f" * 32, b"c" * 32, None, 0))
    with pytest.raises(ProtocolError, match=where.replace("^", r"\^")) as caught:
        decode_hello(memoryview(payload), 8)
    assert caught.value.code == "layout"


def test_w12_step_9() -> None:
    layout = NumericLayout((numeric_fragment(MergeMode.AVG, [2**62]),))
    check_limits_fit(NumericLayout((numeric_fragment(MergeMode.AVG, [2**60]),)), DType.F32)
    with pytest.raises(ProtocolError) as caught:
        check_limits_fit(layout, DType.BF16)
    assert caught.value.code == "layout"


@given(st.binary(max_size=200), st.booleans())
def test_any_hello_is_read_or_refused(raw: bytes, mutate: bool) -> None:
    payload = raw
    if mutate and raw:
        payload = changed(raw[0] % 100, raw[1:])
    try:
        hello = decode_hello(memoryview(payload), 8)
    except ProtocolError:
        return
    assert encode_hello(hello) == payload


def test_data_hello() -> None:
    good = bytes.fromhex("0400 05000000 0100000000000000 0200")
    assert decode_data_hello(memoryview(good), 8).stream_index == 2
    for bad, code in (
        (good[:-1], "bad-length"),
        (b"\5" + good[1:], "version"),
        (good[:2] + b"\x08" + good[3:], "learner-id"),
        (good[:6] + bytes(8) + good[14:], "generation"),
    ):
        with pytest.raises(ProtocolError) as caught:
            decode_data_hello(memoryview(bad), 8)
        assert caught.value.code == code


# -- ERROR -------------------------------------------------------------------------------------


@given(st.text(max_size=1500))
def test_w41_error_text(sentence: str) -> None:
    text = ProtocolError(ErrorCode.CHUNK, sentence).text
    assert len(text.encode()) <= 1024
    assert text.startswith("chunk: ")


def test_w41_cuts_at_a_code_point() -> None:
    assert clip_utf8("é" * 600, 1023) == "é" * 511


@given(st.binary(max_size=64))
def test_error_text_of_any_bytes_is_read(raw: bytes) -> None:
    message = decode_payload(MessageType.ERROR, memoryview(raw))
    assert isinstance(message, ErrorMessage)


def test_limits_know_their_reader() -> None:
    assert MAGIC == 0xD170C0DE
    assert Session(Role.LEARNER, LAYOUT, DType.Q4, 1).tensor_dtype(Broadcast(0, 1, b"")) is (
        DType.BF16
    )
    assert Session(Role.LEARNER, LAYOUT, DType.Q4, 1).tensor_dtype(FinalFragment(0, 1, b"")) is (
        DType.F32
    )
