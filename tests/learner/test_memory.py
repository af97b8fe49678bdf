"""Memory beside the model: one f32 anchor copy, and at most two fragments (issue 6, point 7)."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn

from learner import Learner, LearnerConfig
from learner.errors import SyncerRefused
from tests.learner.scripted import PATIENCE_S, ScriptedSyncer, scripted_syncer, values
from wire import memory
from wire.memory import Slab
from wire.messages import PushFragment

NUMEL = 200_000
FRAGMENTS = 3
ROUNDS = 4


class Equal(nn.Module):
    """One matrix per fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(100, NUMEL // 100) for _ in range(FRAGMENTS))


class Mapped:
    """Bytes of all slabs that exist, whatever they hold and whether they wait or not."""

    def __init__(self) -> None:
        self.slabs: weakref.WeakSet[Slab] = weakref.WeakSet()
        self.most = 0

    def add(self, slab: Slab) -> None:
        self.slabs.add(slab)
        self.most = max(self.most, sum(each.capacity for each in self.slabs))


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Mapped:
    counted = Mapped()

    class Counted(Slab):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            counted.add(self)

    monkeypatch.setattr(memory, "Slab", Counted)
    return counted


def script(syncer: ScriptedSyncer) -> None:
    syncer.accepted()
    for fragment in range(FRAGMENTS):
        syncer.broadcast(fragment, 0, values(NUMEL, fragment))
    version = 0
    for _ in range(ROUNDS):
        for fragment in range(FRAGMENTS):
            version += 1
            syncer.pull(fragment, version)
            syncer.expect(PushFragment)
            syncer.broadcast(fragment, version, values(NUMEL, version))
    syncer.error("enough")


def train(model: Equal, config: LearnerConfig) -> None:
    with Learner(model, config) as sync:
        while True:
            with torch.no_grad():
                for part in model.parts:
                    part.add_(0.01)
            sync.step(tokens=1)


@pytest.mark.parametrize(
    ("dtype", "feedback", "most"),
    [
        # The anchors, a payload, a broadcast that arrives.
        ("bf16", False, FRAGMENTS + 2 * 0.5),
        # A delta is its payload; a broadcast's receive buffer becomes the anchor.
        ("f32", False, FRAGMENTS + 2),
        # A worker encodes, so a delta is whole until then. Broadcasts come in bf16.
        ("q4", False, FRAGMENTS + 1 + 0.15 + 0.5),
        # And a residual per fragment, one that is a candidate.
        ("bf16", True, 2 * FRAGMENTS + 1 + 2 * 0.5),
    ],
)
def test_memory_beside_the_model(mapped: Mapped, dtype: str, feedback: bool, most: float) -> None:
    """Twelve rounds, one after the other, as with a pipeline of 1; what arrives counts too."""
    with scripted_syncer() as syncer:
        config = LearnerConfig(
            connect=f"127.0.0.1:{syncer.port}",
            learner_id=1,  # without INIT, which is kept at first (L14)
            fragments=FRAGMENTS,
            wire_dtype=dtype,
            error_feedback=feedback,
            streams=1,
        )
        talk = threading.Thread(target=script, args=(syncer,))
        talk.start()
        with pytest.raises(SyncerRefused, match="enough"):
            train(Equal(), config)
        talk.join(PATIENCE_S)
    # A broadcast may arrive while the one before is still applied.
    spare = 1 if dtype == "f32" else 0.5
    assert FRAGMENTS < mapped.most / (4 * NUMEL) <= 1.01 * (most + spare)
