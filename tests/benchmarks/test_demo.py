"""The parts of the demo that need no processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.demo.__main__ import DemoFailed, Sizes, alone_is_done, is_over, make_folder
from benchmarks.demo.picture import draw
from benchmarks.demo.programs import Line
from benchmarks.demo.record import ALONE, LearnerRecord, RunRecord
from syncer.tape import CommitRecord, TapeMember, TapeResponder


def line(program: str, event: str, **fields: object) -> Line:
    return Line(program, 1000.0, {"event": event, **fields})


def commit(step: int, expected: set[int], responded: set[int], staleness: int = 0) -> CommitRecord:
    members = tuple(TapeMember(i, 7) for i in sorted(expected))
    answered = tuple(TapeMember(i, 7) for i in sorted(responded))
    responders = tuple(
        TapeResponder(i, 7, step - 1, staleness, 4, 512, 1.0, 0.5) for i in sorted(responded)
    )
    return CommitRecord(
        step=step, fragment=step % 3, ts=1000.0 + step, attempt=1, launch_base_version=0,
        gnorm=0.5, ms=200, quorum=2, expected=members, responded=answered,
        missed=tuple(m for m in members if m not in answered), quorum_ms=100, grace_ms=None,
        sync_ms=20, responders=responders, rejected={}, layout_hash="00", fields={},
    )  # fmt: skip


def run_of(losses: dict[str, list[float]]) -> RunRecord:
    run = RunRecord({name: LearnerRecord() for name in losses if name != ALONE})
    run.alone = LearnerRecord() if ALONE in losses else None
    for name, values in losses.items():
        for number, loss in enumerate(values[:-1]):
            run.add_line(line(name, "evaluation", local_step=25 * number, held_out_loss=loss))
        run.add_line(
            line(name, "final", local_step=25 * len(values), held_out_loss=values[-1], step=9)
        )
    return run


LOSSES = {"learner-0": [5.5, 3.0, 2.5], "learner-1": [5.5, 3.2, 2.5], ALONE: [5.5, 3.5, 3.1]}


def test_the_record_follows_the_lines_of_learners_only() -> None:
    run = run_of(LOSSES)
    run.add_line(line("syncer", "evaluation", local_step=9999, held_out_loss=0.0))
    run.add_line(
        line("learner-1", "progress", local_step=80, loss=2.6, tokens_per_s=9.5, push_bytes=123)
    )
    assert (run.first_loss, run.merged_loss, run.own_steps) == (5.5, 2.5, 80)
    learner = run.learners["learner-1"]
    assert (learner.push_bytes, learner.tokens_per_s, learner.training_loss) == (123, 9.5, 2.6)


def test_answers_and_staleness_come_from_the_tape() -> None:
    run = run_of(LOSSES)
    run.rounds = [commit(1, {0, 1}, {0, 1}, 2), commit(2, {0, 1}, {0})]
    assert (run.answers(0), run.answers(1)) == (2, 1)
    assert (run.staleness(0), run.staleness(1), run.staleness(5)) == (0, 2, None)


def test_the_learner_alone_is_compared_after_as_many_steps() -> None:
    run = run_of(LOSSES)
    assert run.alone is not None
    assert run.alone.loss_at(50) == pytest.approx((3.5 * 25 + 3.1 * 25) / 50)
    assert alone_is_done(run)
    run.add_line(line("learner-0", "progress", local_step=76, loss=1, tokens_per_s=1, push_bytes=1))
    assert not alone_is_done(run)
    run.alone = None
    assert alone_is_done(run)


def test_the_run_ends_by_rounds_or_by_time_but_not_before_a_few_rounds() -> None:
    run = run_of(LOSSES)
    sizes = Sizes(rounds=30, seconds=50)
    assert not is_over(run, sizes, 1000.0)
    run.rounds = [commit(step, {0}, {0}) for step in range(1, 13)]
    assert is_over(run, sizes, 51.0)
    assert not is_over(run, sizes, 49.0)
    run.rounds = [commit(step, {0}, {0}) for step in range(1, 31)]
    assert is_over(run, sizes, 1.0)


@pytest.mark.parametrize("alone", [True, False])
def test_the_picture_is_drawn(tmp_path: Path, alone: bool) -> None:
    run = run_of({name: losses for name, losses in LOSSES.items() if alone or name != ALONE})
    run.rounds = [commit(1, {0, 1}, {0, 1}), commit(2, {0, 1}, {0})]
    draw(run, tmp_path / "demo.png")
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_only_its_own_folder_is_emptied(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    make_folder(mine)
    (mine / "model.safetensors").touch()
    make_folder(mine)
    assert not (mine / "model.safetensors").exists()
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(DemoFailed, match="other"):
        make_folder(other)
    assert (other / "thesis.tex").exists()
