"""Every frame that an existing client really sent and received, whole and in random pieces."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import pytest

from tests.wire.support import DATA, feed, normal
from wire.chunks import Reassembler
from wire.connection import Connection, FirstFrame, Received
from wire.dtypes import DType
from wire.frames import MessageType, Role
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec
from wire.limits import Session
from wire.messages import (
    DataHello,
    Hello,
    Message,
    decode_data_hello,
    decode_hello,
    encode_frame,
)

TYPES = {
    "InitParams": "INIT", "PushFragment": "PUSH", "Heartbeat": "HEARTBEAT", "FinalAck": "FINAL_ACK",
    "BudgetDone": "BUDGET_DONE", "Hello": "HELLO", "DataHello": "DATA_HELLO",
}  # fmt: skip
FIELDS = {
    "learner": "learner_id", "base": "base_version", "streams": "num_streams",
    "index": "stream_index", "protocol": "version",
}  # fmt: skip


class Case(NamedTuple):
    name: str
    session: dict
    connection: dict


def cases() -> list:
    out = []
    for dtype in ("f32", "bf16"):
        for session in json.loads((DATA / f"real_client_{dtype}.json").read_text())["sessions"]:
            for index, connection in enumerate(session["connections"]):
                name = f"{session['name']}-{index}"
                out.append(pytest.param(Case(name, session, connection), id=name))
    return out


def layout_of(session: dict) -> NamedLayout:
    return NamedLayout(
        tuple(
            NamedFragment(
                MergeMode(f["mode"]),
                tuple(TensorSpec(t["name"], tuple(t["shape"])) for t in f["tensors"]),
            )
            for f in session["layout"]
        )
    )


def first_frame(data: bytes) -> tuple[Hello | DataHello, bytes]:
    """The first frame of a socket as a message, and the bytes after it."""
    core = FirstFrame()
    at = 0
    while True:
        room = core.get_buffer()
        piece = data[at : at + len(room)]
        room[: len(piece)] = piece
        at += len(piece)
        if core.buffer_updated(len(piece)):
            kind, payload = core.take()
            if kind is MessageType.HELLO:
                return decode_hello(payload, 8), data[at:]
            return decode_data_hello(payload, 8), data[at:]


def facts(message: Message, summary: dict) -> None:
    assert TYPES[type(message).__name__] == summary["type"]
    for key, value in summary.items():
        if key in ("stream", "type", "chunk", "revision"):
            continue
        got = getattr(message, FIELDS.get(key, key))
        assert (got.hex() if isinstance(got, bytes) else got) == value, key


def decode_sent(case: Case, splits: random.Random | None) -> list[tuple[int, Message]]:
    """All messages of a connection, per socket in order, with their streams."""
    sockets = {s["stream"]: bytes.fromhex("".join(s["sent"])) for s in case.connection["sockets"]}
    hello, _ = first_frame(sockets[0])
    assert isinstance(hello, Hello)
    which = Session(Role.SYNCER, hello.layout, hello.dtype, hello.learner_id)
    chunks = Reassembler(which.role, which.inner_limit)
    out: list[tuple[int, Message]] = []
    for stream, data in sorted(sockets.items()):
        first, rest = first_frame(data)
        out.append((stream, first))
        events = feed(Connection(which, chunks), rest, splits)
        out.extend((stream, event.message) for event in events if isinstance(event, Received))
    return out


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("split", [False, True])
def test_what_the_client_sent(case: Case, split: bool) -> None:
    decoded = decode_sent(case, random.Random(case.name) if split else None)
    summary = sorted(case.connection["decoded"], key=lambda item: item["stream"])
    assert len(decoded) == len(summary)
    for (stream, message), expected in zip(decoded, summary, strict=True):
        assert stream == expected["stream"]
        facts(message, expected)


@pytest.mark.parametrize("case", cases())
def test_our_hello_is_the_clients_hello(case: Case) -> None:
    """Same layout, same names: the same bytes, fingerprint and all."""
    named = layout_of(case.session)
    assert named.fingerprint.hex() == case.session["fingerprint"]
    frame = bytes.fromhex(
        next(s for s in case.connection["sockets"] if s["stream"] == 0)["sent"][0]
    )
    hello, rest = first_frame(frame)
    assert not rest
    assert isinstance(hello, Hello)
    assert hello.layout == named.numeric
    assert encode_frame(hello) == frame


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("split", [False, True])
def test_what_the_client_received(case: Case, split: bool) -> None:
    """The other role: every byte is a legal message for a learner."""
    named = layout_of(case.session)
    dtype = DType.BF16 if "bf16" in case.name else DType.F32
    which = Session(Role.LEARNER, named.numeric, dtype, case.session["learner_id"])
    chunks = Reassembler(which.role, which.inner_limit)
    got = []
    for socket in case.connection["sockets"]:
        data = bytes.fromhex(socket["received"])
        rng = random.Random(case.name) if split else None
        for event in feed(Connection(which, chunks), data, rng):
            assert isinstance(event, Received)
            got.append(normal(event.message))
    assert len(chunks) == 0
    if case.session["name"].startswith("life"):
        assert "Broadcast" in {name for name, _ in got}
