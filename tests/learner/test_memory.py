"""Memory beside the model: one f32 anchor copy, and at most two fragments (issue 6, point 7)."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from learner import Learner, LearnerConfig
from learner.buffers import Buffers
from learner.errors import SyncerRefused
from tests.learner.scripted import PATIENCE_S, ScriptedSyncer, scripted_syncer, values
from wire.messages import PushFragment

NUMEL = 100_000
FRAGMENTS = 3
ROUNDS = 4


class Equal(nn.Module):
    """One matrix per fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(100, NUMEL // 100) for _ in range(FRAGMENTS))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(size, address) of every buffer that was handed out."""
    handed: list[tuple[int, int]] = []
    take = Buffers.take

    def counted(self: Buffers, numel: int) -> Tensor:
        buffer = take(self, numel)
        handed.append((numel, buffer.data_ptr()))
        return buffer

    monkeypatch.setattr(Buffers, "take", counted)
    return handed


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
        # The three anchors, and the delta, which becomes the payload.
        ("bf16", False, FRAGMENTS + 1),
        # An f32 broadcast's receive buffer is the anchor, a delta is the payload.
        ("f32", False, 1),
        # And a residual per fragment, one that is a candidate; the payload has half the size.
        ("bf16", True, 2 * FRAGMENTS + 1),
    ],
)
def test_buffers_of_a_fragment_are_used_again(
    taken: list[tuple[int, int]], dtype: str, feedback: bool, most: int
) -> None:
    """Twelve rounds, one after the other, as with a pipeline of 1."""
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
    pushes = FRAGMENTS * ROUNDS
    whole = [address for numel, address in taken if numel == NUMEL]
    assert len(whole) >= pushes
    # Addresses, not only buffers alive at once: what is given back serves again. One more may be
    # under way while a payload of before is still referred to.
    assert len(set(whole)) <= most + 1
