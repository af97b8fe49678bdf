"""All message types as frozen dataclasses, with their payload codecs (sections 3 and 5).

Tensor fields are any bytes-like object in the message's wire dtype: `decode` never copies them,
and `frame_parts` hands them back untouched, so that a socket can send them from where they lie.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.frames import (
    CHUNK_HEADER,
    DATA_HELLO_BYTES,
    FINALIZATION_REVISION,
    PROTOCOL_VERSION,
    MessageType,
    frame_header,
)
from wire.identity import HASH_BYTES
from wire.layout import LayoutReader, NumericLayout, parse_layout

Buffer = bytes | bytearray | memoryview
"""Anything that holds contiguous bytes."""

_HELLO_HEAD = struct.Struct("<HIQBI")
_DATA_HELLO = struct.Struct("<HIQH")
_FRAGMENT_ID = struct.Struct("<I")
_PULL = struct.Struct("<IQI")
_PUSH_HEAD = struct.Struct("<IIQIQQIQ")
_VERSIONED = struct.Struct("<IQ")
_HEARTBEAT = struct.Struct("<IQ")
_FINAL_ACK = struct.Struct("<HQ")
_MANIFEST_HEAD = struct.Struct("<HQI")
_BUDGET = struct.Struct("<Q")

INIT_HEAD_BYTES = _FRAGMENT_ID.size
PUSH_HEAD_BYTES = _PUSH_HEAD.size
VERSIONED_HEAD_BYTES = _VERSIONED.size
MANIFEST_HEAD_BYTES = _MANIFEST_HEAD.size
PULL_BYTES = _PULL.size
HEARTBEAT_BYTES = _HEARTBEAT.size
FINAL_ACK_BYTES = _FINAL_ACK.size
BUDGET_BYTES = _BUDGET.size


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a control socket: who dials, and the session it wants (section 5)."""

    learner_id: int
    generation: int
    dtype: DType
    layout: NumericLayout
    fingerprint: bytes
    contract: bytes
    profile: bytes | None
    num_streams: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class DataHello:
    """First frame of a data socket: the group it joins, and its 0-based index (W17)."""

    learner_id: int
    generation: int
    stream_index: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class InitParams:
    """Initial values of one fragment, bulk dtype; learner 0 only."""

    fragment: int
    tensor: Buffer


@dataclass(frozen=True, slots=True)
class PullRequest:
    """The syncer asks for the delta of one fragment, for round `step`, attempt >= 1."""

    fragment: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PushFragment:
    """A learner delta (local minus raw anchor), session dtype."""

    learner_id: int
    fragment: int
    step: int
    attempt: int
    base_version: int
    local_step: int
    c_steps: int
    c_tokens: int
    tensor: Buffer


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One global fragment at its version, bulk dtype."""

    fragment: int
    version: int
    tensor: Buffer


@dataclass(frozen=True, slots=True)
class FinalFragment:
    """One fragment of the final cut, always f32."""

    fragment: int
    version: int
    tensor: Buffer


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A learner lives, and how far its local training is."""

    learner_id: int
    local_step: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The run is over for this generation."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One slice of an inner frame (W24)."""

    msg_id: int
    total: int
    offset: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """Fatal for the learner that receives it: `<code>: <sentence>` (W41)."""

    text: str


@dataclass(frozen=True, slots=True)
class FinalManifest:
    """The final step and the version of every fragment of the cut."""

    step: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinalAck:
    """The cut of `step` is applied."""

    step: int


@dataclass(frozen=True, slots=True)
class BudgetDone:
    """The learner has done exactly `steps` optimizer steps and is frozen."""

    steps: int


Message = (
    Hello
    | DataHello
    | InitParams
    | PullRequest
    | PushFragment
    | Broadcast
    | FinalFragment
    | Heartbeat
    | Shutdown
    | Chunk
    | ErrorMessage
    | FinalManifest
    | FinalAck
    | BudgetDone
)
BulkMessage = InitParams | PushFragment | Broadcast | FinalFragment


def frame_parts(message: Message) -> tuple[bytes, Buffer]:
    """A whole frame as (13-byte header and fixed fields, tensor or slice bytes).

    The second part is the message's own buffer, empty for control messages.
    """
    kind, head, body = _payload_parts(message)
    size = body.nbytes if isinstance(body, memoryview) else len(body)
    return frame_header(kind, len(head) + size) + head, body


def encode_frame(message: Message) -> bytes:
    """A whole frame as one bytes object; for control messages and tests."""
    head, body = frame_parts(message)
    return head + bytes(body) if body else head


def _payload_parts(message: Message) -> tuple[MessageType, bytes, Buffer]:
    match message:  # the frequent ones first
        case PullRequest():
            head = _PULL.pack(message.fragment, message.step, message.attempt)
            return MessageType.PULL_REQ, head, b""
        case Heartbeat():
            head = _HEARTBEAT.pack(message.learner_id, message.local_step)
            return MessageType.HEARTBEAT, head, b""
        case Hello():
            return MessageType.HELLO, encode_hello(message), b""
        case DataHello(learner, generation, index, version):
            head = _DATA_HELLO.pack(version, learner, generation, index)
            return MessageType.DATA_HELLO, head, b""
        case InitParams(fragment, tensor):
            return MessageType.INIT_PARAMS, _FRAGMENT_ID.pack(fragment), tensor
        case PushFragment():
            return MessageType.PUSH_FRAGMENT, _push_head(message), message.tensor
        case Broadcast(fragment, version, tensor):
            return MessageType.BCAST_FRAGMENT, _VERSIONED.pack(fragment, version), tensor
        case FinalFragment(fragment, version, tensor):
            return MessageType.FINAL_FRAGMENT, _VERSIONED.pack(fragment, version), tensor
        case Shutdown():
            return MessageType.SHUTDOWN, b"", b""
        case Chunk(msg_id, total, offset, data):
            return MessageType.CHUNK, CHUNK_HEADER.pack(msg_id, total, offset), data
        case ErrorMessage(text):
            return MessageType.ERROR, text.encode("utf-8", "replace"), b""
        case FinalManifest(step, versions):
            head = _MANIFEST_HEAD.pack(FINALIZATION_REVISION, step, len(versions))
            return (
                MessageType.FINAL_MANIFEST,
                head + struct.pack(f"<{len(versions)}Q", *versions),
                b"",
            )
        case FinalAck(step):
            return MessageType.FINAL_ACK, _FINAL_ACK.pack(FINALIZATION_REVISION, step), b""
        case BudgetDone(steps):
            return MessageType.BUDGET_DONE, _BUDGET.pack(steps), b""


def _push_head(push: PushFragment) -> bytes:
    return _PUSH_HEAD.pack(
        push.learner_id,
        push.fragment,
        push.step,
        push.attempt,
        push.base_version,
        push.local_step,
        push.c_steps,
        push.c_tokens,
    )


def encode_hello(hello: Hello) -> bytes:
    """The HELLO payload of section 5, without a seal."""
    head = _HELLO_HEAD.pack(
        hello.version,
        hello.learner_id,
        hello.generation,
        hello.dtype,
        len(hello.layout),
    )
    tail = hello.fingerprint + hello.contract + (hello.profile or b"")
    return head + hello.layout.encode() + tail + struct.pack("<H", hello.num_streams)


def decode_hello(payload: memoryview, learners: int, layouts: LayoutReader = parse_layout) -> Hello:
    """Read a HELLO body, checking steps 1 to 8 of W12 in their order.

    Args:
        payload: the body, without a seal.
        learners: M; legal ids are 0..M-1.
        layouts: reads the layout.

    Raises:
        ProtocolError: with the code of the first failing step.
    """
    _need(payload, 2)
    (version,) = struct.unpack_from("<H", payload)
    _check_version(version)
    _need(payload, _HELLO_HEAD.size)
    _, learner_id, generation, dtype, count = _HELLO_HEAD.unpack_from(payload)
    _check_identity(learner_id, generation, learners)
    if dtype not in (1, 2, 3):
        raise ProtocolError(ErrorCode.DTYPE, f"dtype {dtype} is unknown, known are 1, 2 and 3")
    layout, used = layouts(payload[_HELLO_HEAD.size :], count)
    tail = payload[_HELLO_HEAD.size + used :]
    if len(tail) not in (2 * HASH_BYTES + 2, 3 * HASH_BYTES + 2):
        raise ProtocolError(
            ErrorCode.HELLO_TAIL,
            f"{len(tail)} bytes after the layout, expected 66 (or 98 with a profile)",
        )
    (num_streams,) = struct.unpack_from("<H", tail, len(tail) - 2)
    if num_streams > 256:
        raise ProtocolError(ErrorCode.NUM_STREAMS, f"{num_streams} data sockets, at most 256")
    hashes = bytes(tail[:-2])
    return Hello(
        learner_id=learner_id,
        generation=generation,
        dtype=DType(dtype),
        layout=layout,
        fingerprint=hashes[:HASH_BYTES],
        contract=hashes[HASH_BYTES : 2 * HASH_BYTES],
        profile=hashes[2 * HASH_BYTES :] or None,
        num_streams=num_streams,
        version=version,
    )


def decode_data_hello(payload: memoryview, learners: int) -> DataHello:
    """Read a DATA_HELLO of exactly 16 bytes (W17); the group is the caller's to find."""
    if len(payload) != DATA_HELLO_BYTES:
        raise ProtocolError(ErrorCode.BAD_LENGTH, f"DATA_HELLO has {len(payload)} bytes, not 16")
    version, learner_id, generation, index = _DATA_HELLO.unpack(payload)
    _check_version(version)
    _check_identity(learner_id, generation, learners)
    return DataHello(learner_id, generation, index, version)


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(ErrorCode.VERSION, f"protocol version {version}, this syncer speaks 4")


def _check_identity(learner_id: int, generation: int, learners: int) -> None:
    if learner_id >= learners:
        raise ProtocolError(
            ErrorCode.LEARNER_ID, f"learner id {learner_id} is not in 0..{learners - 1}"
        )
    if generation == 0:
        raise ProtocolError(ErrorCode.GENERATION, "generation 0 is not allowed")


def _need(payload: memoryview, size: int) -> None:
    if len(payload) < size:
        raise ProtocolError(ErrorCode.BAD_LENGTH, f"HELLO ends after {len(payload)} bytes")


def _decode_init(payload: memoryview) -> Message:
    return InitParams(_FRAGMENT_ID.unpack_from(payload)[0], payload[INIT_HEAD_BYTES:])


def _decode_pull(payload: memoryview) -> Message:
    return PullRequest(*_PULL.unpack(payload))


def _decode_push(payload: memoryview) -> Message:
    learner, fragment, step, attempt, base, local, c_steps, c_tokens = _PUSH_HEAD.unpack_from(
        payload
    )
    tensor = payload[PUSH_HEAD_BYTES:]
    return PushFragment(learner, fragment, step, attempt, base, local, c_steps, c_tokens, tensor)


def _decode_broadcast(payload: memoryview) -> Message:
    fragment, version = _VERSIONED.unpack_from(payload)
    return Broadcast(fragment, version, payload[VERSIONED_HEAD_BYTES:])


def _decode_final_fragment(payload: memoryview) -> Message:
    fragment, version = _VERSIONED.unpack_from(payload)
    return FinalFragment(fragment, version, payload[VERSIONED_HEAD_BYTES:])


def _decode_heartbeat(payload: memoryview) -> Message:
    return Heartbeat(*_HEARTBEAT.unpack(payload))


def _decode_shutdown(payload: memoryview) -> Message:
    if len(payload):
        raise ProtocolError(ErrorCode.BAD_LENGTH, f"SHUTDOWN carries {len(payload)} bytes")
    return Shutdown()


def _decode_error(payload: memoryview) -> Message:
    return ErrorMessage(bytes(payload).decode("utf-8", "replace"))


def _decode_manifest(payload: memoryview) -> Message:
    revision, step, count = _MANIFEST_HEAD.unpack_from(payload)
    _check_revision(revision)
    if len(payload) != MANIFEST_HEAD_BYTES + 8 * count:
        raise ProtocolError(
            ErrorCode.BAD_LENGTH, f"a manifest of {count} fragments has {len(payload)} bytes"
        )
    return FinalManifest(step, struct.unpack_from(f"<{count}Q", payload, MANIFEST_HEAD_BYTES))


def _decode_ack(payload: memoryview) -> Message:
    revision, step = _FINAL_ACK.unpack(payload)
    _check_revision(revision)
    return FinalAck(step)


def _decode_budget(payload: memoryview) -> Message:
    return BudgetDone(_BUDGET.unpack(payload)[0])


def _check_revision(revision: int) -> None:
    if revision != FINALIZATION_REVISION:
        raise ProtocolError(
            ErrorCode.REVISION, f"finalization revision {revision}, this program speaks 1"
        )


_DECODERS: dict[MessageType, Callable[[memoryview], Message]] = {
    MessageType.INIT_PARAMS: _decode_init,
    MessageType.PULL_REQ: _decode_pull,
    MessageType.PUSH_FRAGMENT: _decode_push,
    MessageType.BCAST_FRAGMENT: _decode_broadcast,
    MessageType.HEARTBEAT: _decode_heartbeat,
    MessageType.SHUTDOWN: _decode_shutdown,
    MessageType.ERROR: _decode_error,
    MessageType.FINAL_MANIFEST: _decode_manifest,
    MessageType.FINAL_ACK: _decode_ack,
    MessageType.FINAL_FRAGMENT: _decode_final_fragment,
    MessageType.BUDGET_DONE: _decode_budget,
}


def decode_payload(kind: MessageType, payload: memoryview) -> Message:
    """Read the payload of any type but HELLO, DATA_HELLO and CHUNK.

    Checks structure only; `wire.limits.Session.check` applies W11.

    Raises:
        ProtocolError: `bad-length` when it is cut off or has trailing bytes, or `revision`.
    """
    try:
        return _DECODERS[kind](payload)
    except struct.error as error:
        raise ProtocolError(
            ErrorCode.BAD_LENGTH, f"{kind.name} has a payload of {len(payload)} bytes"
        ) from error
