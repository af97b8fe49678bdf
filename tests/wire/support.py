"""Small sessions, a driver for the connection core, and the byte streams of a real client."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wire.chunks import Reassembler
from wire.connection import Connection, Event, Progress, Received
from wire.dtypes import DType
from wire.frames import CHUNK_HEADER, MAGIC, MessageType, Role
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.limits import Session
from wire.messages import (
    Broadcast,
    BudgetDone,
    FinalAck,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    InitParams,
    Message,
    PullRequest,
    PushFragment,
    Shutdown,
    encode_frame,
)

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "golden.json").read_text())["vectors"]
LAYOUT = NumericLayout(
    (
        numeric_fragment(MergeMode.AVG, [12, 8]),
        numeric_fragment(MergeMode.RDA, [300, 1]),
        numeric_fragment(MergeMode.ISO, [6], [(2, 3)]),
    )
)


def golden(kind: str) -> list[dict]:
    return [vector for vector in GOLDEN if vector["kind"] == kind]


def session(
    role: Role = Role.SYNCER,
    dtype: DType = DType.F32,
    learner: int = 0,
    layout: NumericLayout = LAYOUT,
) -> Session:
    return Session(role, layout, dtype, learner)


def tensor(fragment: int, dtype: DType = DType.F32, layout: NumericLayout = LAYOUT) -> bytes:
    """Finite bytes of the right length: zeros with a mark."""
    size = dtype.size(layout.fragments[fragment].numel)
    return struct.pack("<H", fragment + 1) + bytes(size - 2)


def push(fragment: int, learner: int = 0, data: bytes | None = None, **fields: int) -> PushFragment:
    values = {
        "step": 1,
        "attempt": 1,
        "base_version": 0,
        "local_step": 3,
        "c_steps": 3,
        "c_tokens": 96,
    } | fields
    return PushFragment(
        learner, fragment, **values, tensor=tensor(fragment) if data is None else data
    )


def normal(message: Message) -> tuple[str, tuple]:
    """A message as comparable values, its tensor as bytes."""
    names = message.__slots__
    values = [getattr(message, name) for name in names]
    return type(message).__name__, tuple(
        bytes(value) if isinstance(value, memoryview | bytearray) else value for value in values
    )


def frame(kind: int, payload: bytes, magic: int = MAGIC, length: int | None = None) -> bytes:
    return struct.pack("<IBQ", magic, kind, len(payload) if length is None else length) + payload


def chunk(msg_id: int, inner: bytes, offset: int, length: int, total: int | None = None) -> bytes:
    header = CHUNK_HEADER.pack(msg_id, len(inner) if total is None else total, offset)
    return frame(MessageType.CHUNK, header + inner[offset : offset + length])


def chunks(msg_id: int, inner: bytes, cuts: list[int]) -> list[bytes]:
    """The inner frame cut at the given places."""
    edges = sorted({0, len(inner), *(cut for cut in cuts if 0 < cut < len(inner))})
    return [chunk(msg_id, inner, start, end - start) for start, end in itertools.pairwise(edges)]


def connection(which: Session, **options: bool) -> Connection:
    return Connection(which, Reassembler(which.role, which.inner_limit), **options)


def feed(core: Connection, data: bytes, splits: random.Random | None = None) -> Iterator[Event]:
    """Give bytes to a core as a socket would: as much as there is room, or random pieces."""
    view = memoryview(data)
    while view:
        room = core.get_buffer()
        assert len(room) > 0
        count = min(len(room), len(view))
        if splits is not None:
            count = splits.randint(1, min(count, 64))
        room[:count] = view[:count]
        view = view[count:]
        if core.buffer_updated(count):
            while (event := core.next_event()) is not None:
                yield event
        assert not core.blocked


def messages(core: Connection, data: bytes, splits: random.Random | None = None) -> list[Message]:
    events = feed(core, data, splits)
    return [event.message for event in events if not isinstance(event, Progress)]


def received(events: list[Event]) -> list[Message]:
    return [event.message for event in events if isinstance(event, Received)]


SYNCER_MESSAGES: list[Message] = [
    Heartbeat(0, 7),
    InitParams(1, tensor(1)),
    push(0),
    push(2, step=5),
    FinalAck(17),
    BudgetDone(4),
]
LEARNER_MESSAGES: list[Message] = [
    PullRequest(1, 4, 2),
    Broadcast(0, 3, tensor(0)),
    FinalFragment(2, 9, tensor(2)),
    FinalManifest(9, (9, 8, 7)),
    Shutdown(),
]


def valid_messages(role: Role) -> list[Message]:
    return SYNCER_MESSAGES if role is Role.SYNCER else LEARNER_MESSAGES


def random_stream(role: Role, rng: random.Random, count: int) -> tuple[bytes, list[Message]]:
    """A legal byte stream: plain frames and whole messages in shuffled CHUNKs, and its messages."""
    stream, expected = [], []
    for msg_id in range(count):
        message = rng.choice(valid_messages(role))
        inner = encode_frame(message)
        expected.append(message)
        if rng.random() < 0.5:
            stream.append(inner)
            continue
        parts = chunks(msg_id, inner, [rng.randrange(len(inner)) for _ in range(rng.randrange(5))])
        rng.shuffle(parts)
        stream.extend(parts)
    return b"".join(stream), expected


def values_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")
