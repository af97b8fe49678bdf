"""What a running learner says."""

from __future__ import annotations

import logging

import pytest

from learner.events import Counters, Result, StepInfo
from learner.progress import LINE_EVERY_S, Progress
from learner.tasks.base import TrainStep


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda event: [
        record.fields for record in caplog.records if record.fields["event"] == event
    ]


def test_one_line_every_few_seconds_covers_all_steps_since_the_last(said, caplog) -> None:
    clock = Clock()
    progress = Progress(live=False, clock=clock)
    counters = Counters(
        merges_applied=7, pushes=3, push_bytes=1_500_000, received_bytes=2_500_000, stale_steps=5,
        step_seconds=0.06, redials=1,
    )  # fmt: skip
    for step in range(1, 9):
        clock.now += LINE_EVERY_S / 4
        info = StepInfo(local_step=step, connected=step < 8)
        progress.stepped(TrainStep(loss=float(step), tokens=30), info, counters)
    first, second = said("progress")
    assert (first["local_step"], second["local_step"]) == (4, 8)
    assert first["loss"] == 2.5
    assert second["tokens_per_s"] == pytest.approx(4 * 30 / LINE_EVERY_S)
    assert second["push_bytes"] == 1_500_000
    assert (first["connected"], second["connected"]) == (True, False)
    assert "no syncer" in caplog.messages[1]
    assert "1.5 MB" in caplog.messages[0]
    assert (first["sync"], second["sync"]) == ("in sync", "no syncer")
    assert (first["received_bytes"], first["stale_steps"], first["redials"]) == (2_500_000, 5, 1)
    assert first["step_seconds"] == 0.06
    assert first["step_percent"] == pytest.approx(100 * 0.06 / LINE_EVERY_S)
    assert caplog.messages[0] == (
        "step 4: loss 2.500, held-out nan, 40 tokens/s; in sync; 7 broadcasts applied, 3 pushes, "
        "5 steps stale; 1.5 MB out, 2.5 MB in; 0.1 s lost to sync (2.0 %)"
    )


def test_evaluations_and_the_end_are_said_at_once(said, caplog) -> None:
    progress = Progress(live=False, clock=Clock())
    progress.evaluated(0, 5.5)
    result = Result(
        step=40, versions=(40,), fingerprint="f", contract="c", learner_id=1, local_step=90,
        acknowledged=True,
    )  # fmt: skip
    counters = Counters(pushes=3, push_bytes=1000, received_bytes=2000, step_seconds=1.5)
    progress.finished(result, 90, 2.25, counters)
    assert "3 pushes, 0 steps stale; 0.0 MB out, 0.0 MB in; 1.5 s lost to sync" in caplog.text
    progress.finished(None, 80, 2.5, Counters())
    assert said("evaluation") == [{"event": "evaluation", "local_step": 0, "held_out_loss": 5.5}]
    synced, alone = said("final")
    assert (synced["step"], synced["local_step"], synced["held_out_loss"]) == (40, 90, 2.25)
    assert (alone["step"], alone["local_step"]) == (None, 80)
    for field in ("pushes", "push_bytes", "received_bytes", "step_seconds", "step_percent"):
        assert field in synced


def test_a_baseline_says_nothing_of_sync(said, caplog) -> None:
    clock = Clock()
    progress = Progress(live=False, alone=True, clock=clock)
    clock.now += LINE_EVERY_S
    progress.stepped(TrainStep(loss=1.0, tokens=30), StepInfo(local_step=1), Counters())
    assert caplog.messages == ["step 1: loss 1.000, held-out nan, 10 tokens/s; without sync"]
    assert said("progress")[0]["sync"] == "without sync"
