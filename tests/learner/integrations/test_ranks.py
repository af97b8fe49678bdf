"""Callbacks in real trainers of two ranks, started by torchrun, gloo on the CPU."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.learner import scripted
from tests.learner.scripted import ScriptedSyncer, scripted_syncer, values
from tests.learner.torchrun import reports, two_ranks
from wire.messages import FinalAck, InitParams, PushFragment

PROGRAM = Path(__file__).with_name("ranks_trainer.py")
START_S = 150.0
NUMEL = 10


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun imports torch three times before anything happens."""
    monkeypatch.setattr(scripted, "PATIENCE_S", START_S)


def trainer(syncer: ScriptedSyncer, kind: str, out: Path) -> AbstractContextManager[None]:
    return two_ranks(PROGRAM, syncer, kind, str(out), seconds=START_S)


def need(kind: str) -> None:
    for module in (kind, "accelerate") if kind == "transformers" else (kind,):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; pip install -e '.[{kind}]'")


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_two_ranks_are_one_learner(kind: str, tmp_path: Path) -> None:
    """Points 1, 3, 4: one HELLO, units of both ranks, events on the first, the cut on both."""
    need(kind)
    cut = values(NUMEL, 9)
    with scripted_syncer() as syncer, trainer(syncer, kind, tmp_path):
        syncer.accepted()
        syncer.expect(InitParams)
        syncer.broadcast(0, 0, values(NUMEL, 7))
        syncer.pull(0, 1)
        push = syncer.expect(PushFragment)
        # Two samples a step on each of two ranks.
        assert push.c_tokens == 4 * push.c_steps
        syncer.broadcast(0, 1, values(NUMEL, 8))
        syncer.cut(1, (1,), [cut])
        assert syncer.expect(FinalAck).step == 1
        syncer.shutdown()
    assert syncer.hellos.empty()
    first, second = reports(tmp_path)
    assert {"LinkUp", "BroadcastApplied", "PushSent", "Finalizing"} <= set(first["events"])
    assert second["events"] == []
    for report in (first, second):
        assert report["result"] == [1]
        assert report["units"] == 4 * report["steps"]
        assert sorted(report["values"]) == sorted(cut.tolist())
    assert first["steps"] == second["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_a_fatal_error_ends_both(kind: str, tmp_path: Path) -> None:
    """L62."""
    need(kind)
    with scripted_syncer() as syncer, trainer(syncer, kind, tmp_path):
        syncer.accepted()
        syncer.error("enough")
    for report in reports(tmp_path):
        assert report["error"] == "SyncerRefused: stopped: enough"
