"""An existing client's recorded sessions, replayed against our session core.

The scripted server says the same things at the same boundaries; what our learner would send must
be what the existing client sent, byte for byte, except where its behaviour goes beyond our rules
(P4: it answers every attempt; P5 does not occur in the script).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.fragments import Answer, Received
from learner.parameters import Parameters
from learner.session import Session
from wire.dtypes import DType
from wire.frames import CHUNK_BYTES, FRAME_BYTES, FRAME_HEADER, MessageType
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec
from wire.messages import FinalManifest, InitParams, PullRequest, PushFragment, decode_payload
from wire.tensors import decode, encode

DATA = Path(__file__).parents[1] / "data"
SESSIONS = [
    pytest.param(session, DType(document["dtype_code"]), id=session["name"])
    for document in (
        json.loads((DATA / f"real_client_{d}.json").read_text()) for d in ("f32", "bf16")
    )
    for session in document["sessions"]
]
LIFE = [p for p in SESSIONS if p.id.startswith("life")]
BUDGET = [p for p in SESSIONS if p.id.startswith("budget")]
G1, G2 = 1, 2


def vector(hexed: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(hexed), dtype=torch.float32)


def sent(capture: dict[str, Any], kind: type) -> Iterator[Any]:
    """Every message of one kind the client sent, CHUNKs opened (each fits one slice)."""
    for connection in capture["connections"]:
        for socket in connection["sockets"]:
            for outer in map(bytes.fromhex, socket["sent"]):
                chunked = outer[4] == MessageType.CHUNK
                frame = outer[FRAME_BYTES + CHUNK_BYTES :] if chunked else outer
                code = FRAME_HEADER.unpack_from(frame)[1]
                if code in (MessageType.INIT_PARAMS, MessageType.PUSH_FRAGMENT):
                    message = decode_payload(MessageType(code), memoryview(frame)[FRAME_BYTES:])
                    if isinstance(message, kind):
                        yield message


class Replay:
    """Our learner with the capture's model and numbers."""

    def __init__(self, capture: dict[str, Any], dtype: DType) -> None:
        self.capture, self.dtype = capture, dtype
        self.layout = NamedLayout(
            tuple(
                NamedFragment(
                    MergeMode(f["mode"]),
                    tuple(TensorSpec(t["name"], tuple(t["shape"])) for t in f["tensors"]),
                )
                for f in capture["layout"]
            )
        )
        flats = [vector(text) for text in capture["init"]]
        trainables: dict[str, nn.Parameter] = {}
        for fragment, flat in zip(self.layout.fragments, flats, strict=True):
            parts = flat.split([t.numel for t in fragment.tensors])
            for spec, part in zip(fragment.tensors, parts, strict=True):
                trainables[spec.name] = nn.Parameter(part.clone().view(spec.shape))
        self.trainables = trainables
        self.parameters = Parameters(trainables, self.layout)
        self.session: Session[Tensor] = Session(len(self.layout))
        self.session.connected(G1)
        self.steps = iter(capture["steps"])
        self.generation = G1
        self.pushes: list[PushFragment] = []

    def broadcast(self, fragment: int, version: int, values: Tensor) -> None:
        payload = bytes(encode(values, self.dtype.bulk))
        decoded = decode(payload, self.dtype.bulk, values.numel())
        digest = hashlib.sha256(payload).digest()
        self.session.broadcast(self.generation, fragment, Received(version, digest, decoded))

    def pull(self, fragment: int, step: int, attempt: int) -> None:
        self.session.pull(self.generation, PullRequest(fragment, step, attempt))

    def redial(self) -> None:
        self.session.disconnected(G1)
        self.session.connected(G2)
        self.generation = G2

    def train(self) -> None:
        step = next(self.steps)
        with torch.no_grad():
            for name, text in step["update"].items():
                self.trainables[name].add_(vector(text).view(self.trainables[name].shape))
        self.session.advance(step["tokens"])
        for apply in self.session.take_broadcasts():
            self.parameters.blend(apply.fragment, apply.received.values, self.capture["alpha"])
            self.session.applied(apply, apply.received.values)
        self.answer()

    def answer(self) -> None:
        for answer in self.session.take_answers():
            self.pushes.append(self.push(answer))

    def push(self, answer: Answer[Tensor]) -> PushFragment:
        delta = self.parameters.delta(answer.pull.fragment, answer.anchor)
        return PushFragment(
            self.capture["learner_id"],
            answer.pull.fragment,
            answer.pull.step,
            answer.pull.attempt,
            answer.base_version,
            answer.local_step,
            answer.c_steps,
            answer.c_tokens,
            bytes(encode(delta, self.dtype)),
        )

    def finish(self) -> None:
        versions = tuple(self.capture["final_versions"])
        for fragment, text in enumerate(self.capture["final"]):
            received = Received(versions[fragment], text.encode(), vector(text))
            self.session.final_fragment(self.generation, fragment, received)
        manifest = FinalManifest(self.capture["final_step"], versions)
        assert not self.session.final_manifest(self.generation, manifest)
        for fragment, values in enumerate(self.session.cut()):
            self.parameters.overwrite(fragment, values)
        assert self.session.applied_cut() == self.generation
        self.session.ack_begun(self.generation)
        self.session.shutdown(self.generation)


def comparable(pushes: Iterator[PushFragment] | list[PushFragment]) -> dict[Any, tuple[Any, ...]]:
    return {
        (p.fragment, p.step, p.attempt): (
            p.learner_id,
            p.base_version,
            p.local_step,
            p.c_steps,
            p.c_tokens,
            bytes(p.tensor),
        )
        for p in pushes
    }


@pytest.mark.parametrize(("capture", "dtype"), SESSIONS)
def test_identity_of_the_layout(capture: dict[str, Any], dtype: DType) -> None:
    """W20."""
    assert Replay(capture, dtype).layout.fingerprint.hex() == capture["fingerprint"]


@pytest.mark.parametrize(("capture", "dtype"), LIFE)
def test_life(capture: dict[str, Any], dtype: DType) -> None:
    """Pulls before broadcasts, attempts, replays, lower versions, a redial, the final cut."""
    replay = Replay(capture, dtype)
    inits = {m.fragment: bytes(m.tensor) for m in sent(capture, InitParams)}
    for fragment in range(len(replay.layout)):
        ours = bytes(encode(replay.parameters.snapshot(fragment), dtype.bulk))
        assert ours == inits[fragment]

    first = [vector(text) for text in capture["bcast0"]]
    second = vector(capture["bcast1"])
    replay.pull(0, 1, 1)
    replay.train()
    for fragment, values in enumerate(first):
        replay.broadcast(fragment, 0, values)
    replay.train()
    replay.train()
    replay.pull(1, 2, 1)
    replay.pull(1, 2, 2)
    replay.train()
    for version, values in ((1, second), (1, second), (0, first[0])):
        replay.broadcast(0, version, values)
    replay.train()
    for version, values in ((1, second), (0, first[0])):
        replay.broadcast(0, version, values)
    replay.pull(0, 3, 1)
    replay.train()
    replay.pull(1, 4, 1)
    replay.redial()
    replay.broadcast(0, 1, second)
    replay.broadcast(1, 0, first[1])
    replay.train()
    replay.pull(1, 4, 2)
    replay.train()

    ours, theirs = comparable(replay.pushes), comparable(sent(capture, PushFragment))
    assert ours == {key: theirs[key] for key in ours}
    # Beyond ours they answered the first attempt of the round as well (P4).
    assert set(theirs) - set(ours) == {(1, 2, 1)}
    assert replay.session.warnings == []

    replay.finish()
    for fragment, text in enumerate(capture["final"]):
        assert torch.equal(replay.parameters.snapshot(fragment), vector(text))


@pytest.mark.parametrize(("capture", "dtype"), BUDGET)
def test_budget(capture: dict[str, Any], dtype: DType) -> None:
    """L40-L42: frozen local minus the resumed state, in f32 and bf16."""
    replay = Replay(capture, dtype)
    for fragment, text in enumerate(capture["bcast10"]):
        replay.broadcast(fragment, 10, vector(text))
    replay.train()
    replay.train()
    assert replay.session.report_budget() == G1
    replay.redial()
    for fragment, text in enumerate(capture["bcast3"]):
        replay.broadcast(fragment, 3, vector(text))
    for fragment in range(2):
        replay.pull(fragment, 4 + fragment, 1)
        replay.answer()
    assert comparable(replay.pushes) == comparable(sent(capture, PushFragment))
    replay.finish()
