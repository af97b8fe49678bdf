"""The quality benchmark: command lines, what counts as a result, ratios; and q4 for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.demo.programs import Line
from benchmarks.quality import (
    ARMS,
    REFERENCE,
    WANTED,
    Losses,
    Record,
    RunFailed,
    Sizes,
    learner_flags,
    rows,
    syncer_flags,
    train,
)
from learner.cli import main as learner_main
from learner.options import Options, read_options
from syncer.cli import main as syncer_main

SIZES = Sizes(rounds=3, every=5, fragments=4)
ARM = {arm.name: arm for arm in ARMS}


def options(name: str, learner: int) -> Options:
    flags = learner_flags(ARM[name], SIZES, seed=7, learner=learner, port=4000)
    return read_options(learner_main.make_context("yeto-learner", flags).params)


def finished(**changes: object) -> Record:
    """Two learners at the end of a run; `changes` are what the second one says instead."""
    record = Record()
    for name, different in (("learner-0", {}), ("learner-1", changes)):
        last = {"local_step": 15, "step": 12, "held_out_loss": 3.0, **different}
        start = {"event": "evaluation", "local_step": 0, "held_out_loss": 5.5}
        record.add(Line(name, 0.0, start))
        record.add(Line(name, 1.0, {"event": "final", **last}))
    return record


def test_arms_differ_in_wire_dtype_and_error_feedback_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(syncer_main, [*syncer_flags(SIZES, tmp_path), "--print-profile"])
    assert result.exit_code == 0, result.output
    reference = options(REFERENCE, 1)
    assert (reference.config.sync_every, reference.config.alpha) == (5, 0.0)
    assert (reference.settings.seed, reference.config.learner_id) == (7, 1)
    for name in ARM:
        found = options(name, 1)
        assert found.settings == reference.settings
        same = {
            "wire_dtype": found.config.wire_dtype,
            "error_feedback": found.config.error_feedback,
        }
        assert found.config == replace(reference.config, **same)
    kinds = {(o.config.wire_dtype, o.config.error_feedback) for o in (options(n, 0) for n in ARM)}
    assert len(kinds) == len(ARMS)


def test_a_result_is_one_model_after_exactly_the_planned_steps() -> None:
    assert finished().losses(SIZES) == Losses(initial=5.5, final=3.0)
    for different in (
        {"held_out_loss": 3.1}, {"local_step": 14}, {"step": 11}, {"held_out_loss": float("nan")},
    ):  # fmt: skip
        with pytest.raises(RunFailed):
            finished(**different).losses(SIZES)
    with pytest.raises(RunFailed, match="2 learners"):
        finished().losses(replace(SIZES, learners=3))


def test_ratios_are_of_means_and_tell_the_spread_of_the_seeds() -> None:
    runs = {
        REFERENCE: [Losses(5.5, 2.0), Losses(5.7, 3.0)],
        "q4_feedback": [Losses(5.5, 2.2), Losses(5.7, 3.0)],
    }
    found = {metric: (value, note) for metric, value, _, note in rows(runs, SIZES)}
    assert found["quality_loss_initial"][0] == pytest.approx(5.6)
    assert found["quality_loss_f32"][0] == pytest.approx(2.5)
    assert found["q4_feedback_vs_f32"][0] == pytest.approx(1.04)
    assert "1.0000 to 1.1000" in found["q4_feedback_vs_f32"][1]
    assert "f32_vs_f32" not in found


@pytest.mark.slow
def test_l29_q4_with_error_feedback_ends_within_one_percent_of_f32(tmp_path: Path) -> None:
    losses = {}
    for name in (REFERENCE, "q4_feedback"):
        folder = tmp_path / name
        folder.mkdir()
        losses[name] = train(ARM[name], Sizes(), 0, folder)
    reference, found = losses[REFERENCE], losses["q4_feedback"]
    assert reference.final < 0.7 * reference.initial  # something was learnt
    assert found.final <= WANTED["q4_feedback"] * reference.final
