"""Islands of two ranks, started by torchrun, gloo on the CPU (L60-L62)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.learner import scripted
from tests.learner.scripted import ScriptedSyncer, scripted_syncer, values
from tests.learner.torchrun import reports, two_ranks
from wire.dtypes import DType
from wire.messages import FinalAck, InitParams, PushFragment
from wire.tensors import encode

PROGRAM = Path(__file__).with_name("ranks_program.py")
START_S = 120.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun imports torch three times before anything happens."""
    monkeypatch.setattr(scripted, "PATIENCE_S", START_S)


def island(
    syncer: ScriptedSyncer, kind: str, out: Path, state: str = "-"
) -> AbstractContextManager[None]:
    return two_ranks(PROGRAM, syncer, kind, str(out), state, seconds=START_S)


def initial() -> list[Tensor]:
    """The fragments: the embedding; then weight and bias, largest first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Embedding(7, 4))
    model.add_module("body", torch.nn.Linear(4, 5))
    return [
        model.embed.weight.detach().flatten(),
        torch.cat([model.body.weight.detach().flatten(), model.body.bias.detach()]),
    ]


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_ranks_are_one_learner(kind: str, tmp_path: Path) -> None:
    """Rank 0 talks; both blend, both hold the cut to the bit; sharded or replicated (L60, L31)."""
    start = initial()
    anchors = [values(t.numel(), 5 + i) for i, t in enumerate(start)]
    cut = [values(t.numel(), 50 + i) for i, t in enumerate(start)]
    with scripted_syncer() as syncer, island(syncer, kind, tmp_path):
        syncer.accepted()
        inits = {m.fragment: bytes(m.tensor) for m in (syncer.expect(InitParams) for _ in range(2))}
        for fragment, tensor in enumerate(start):
            assert inits[fragment] == bytes(encode(tensor, DType.F32))
            syncer.broadcast(fragment, 0, anchors[fragment])
        for fragment in range(2):
            syncer.pull(fragment, 1 + fragment)
        for _ in range(2):
            push = syncer.expect(PushFragment)
            blended = 0.5 * start[push.fragment] + 0.5 * anchors[push.fragment]
            delta = (blended + 0.125 + 0.125) - anchors[push.fragment]
            assert bytes(push.tensor) == bytes(encode(delta, DType.F32))
            # Two steps of 8 units on each of two ranks.
            assert (push.local_step, push.c_steps, push.c_tokens) == (2, 2, 32)
        syncer.cut(2, (1, 2), cut)
        assert syncer.expect(FinalAck).step == 2
        syncer.shutdown()
    expected = [
        cut[0].tolist(),
        cut[1][:20].tolist(),
        cut[1][20:].tolist(),
    ]
    for report in reports(tmp_path):
        assert report["values"] == expected
        assert report["result"] == [1, 2]
        assert "error" not in report
    # Point 1: the first rank's callback only, which reports for the island.
    first, second = (report["events"] for report in reports(tmp_path))
    assert second == []
    assert first.count("PushSent") == first.count("BroadcastApplied") == 2
    assert {"LinkUp", "Finalizing"} <= set(first)


@pytest.mark.slow
def test_a_fatal_error_reaches_every_rank(tmp_path: Path) -> None:
    """L62; and the state that both ranks saved is found again by both (L51)."""
    state = tmp_path / "state"
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    start = initial()
    anchors = [values(t.numel(), 5 + i) for i, t in enumerate(start)]
    with scripted_syncer() as syncer, island(syncer, "fsdp", first, str(state)):
        syncer.accepted()
        for fragment in range(2):
            syncer.broadcast(fragment, 0, anchors[fragment])
            syncer.pull(fragment, 1 + fragment)
        seen = 0
        while seen < 2:
            message = syncer.inbox.get(timeout=START_S)
            seen += isinstance(message, PushFragment)
        for fragment in range(2):
            syncer.broadcast(fragment, 1 + fragment, anchors[fragment])
            syncer.pull(fragment, 3 + fragment)
        for _ in range(2):
            syncer.expect(PushFragment)
        syncer.error("enough")
    assert reports(first)[1]["events"] == []
    for report in reports(first):
        assert report["error"] == "SyncerRefused: stopped: enough"
        assert report["steps"] == 4
    with scripted_syncer() as syncer, island(syncer, "fsdp", second, str(state)):
        syncer.accepted()
        syncer.error("that will do")
    for report in reports(second):
        assert report["error"] == "SyncerRefused: stopped: that will do"
        assert report["steps"] == 2
