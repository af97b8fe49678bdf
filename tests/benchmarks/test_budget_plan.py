"""Command lines, the order of cases, results files, and summaries of the budget benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.budget.__main__ import main
from benchmarks.budget.plan import (
    ARMS,
    Paths,
    Sizes,
    consolidation_flags,
    cutoff_flags,
    expected,
    identity,
    learner_flags,
    plan,
)
from benchmarks.budget.replay import check_frozen, check_replay, compare, replay
from benchmarks.budget.results import Record, Results, ResultsRefused, parse_line
from benchmarks.budget.summary import report_text, rows, summarise, summary_document
from checkpoint.snapshot import FragmentState
from learner.cli import main as learner_main
from syncer.cli import main as syncer_main
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec

SIZES = Sizes(steps=10)
PATHS = Paths("c.ckpt", "t.jsonl", "r.json")
RECORD = Record(
    key="m2/seed0",
    name="m2",
    learners=2,
    seed=0,
    identity="i",
    passed=True,
    violations=(),
    tokens=100,
    wall_s=1.0,
    initial_loss=5.0,
    held_out_loss=3.0,
    cutoff_step=7,
    fragments=4,
    replay_difference=0.0,
    bits_equal=True,
)
BASELINE = replace(RECORD, key="baseline-m2/seed0", name="baseline-m2", held_out_loss=2.5)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_both_syncers_take_the_command_line(arm, tmp_path: Path) -> None:
    """C70, C76: every arm's options are accepted together; --print-profile touches nothing."""
    first = cutoff_flags(arm, SIZES, PATHS)
    second = consolidation_flags(arm, SIZES, PATHS, port=4000, cutoff=7, fragments=4)
    profiles = []
    for flags in (first, second):
        result = CliRunner().invoke(syncer_main, [*flags, "--print-profile"])
        assert result.exit_code == 0, result.output
        profiles.append(result.output)
    assert profiles[0] != profiles[1]
    assert {"--learner-budget-steps=10", f"--learners={arm.learners}"} <= set(first)
    assert not any(flag.startswith(("--resume", "--mark", "--total")) for flag in first)
    assert {
        "--resume", "--mark-final-checkpoint", "--total-steps=11", "--sync-interval-steps=0",
        f"--quorum={arm.learners}", "--port=4000",
    } <= set(second)  # fmt: skip
    assert not any(flag.startswith("--learner-budget") for flag in second)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_the_learner_takes_the_command_line(arm, tmp_path: Path) -> None:
    """All options are valid: what stops it is a text that is too short."""
    text = tmp_path / "text"
    text.write_text("short")
    flags = learner_flags(
        arm, SIZES, seed=3, learner=1, port=1, run_id="x", data=str(text),
        output_dir=str(tmp_path / "out"), state_dir=str(tmp_path / "state"),
    )  # fmt: skip
    result = CliRunner().invoke(learner_main, flags)
    assert result.exit_code == 2
    assert "the text is too short" in result.output


def test_what_makes_an_arm_shows_in_its_command_line() -> None:
    flags = {name: cutoff_flags(arm, SIZES, PATHS) for name, arm in ARMS.items()}
    assert "--learners=4" in flags["m4"]
    assert "--pipeline=1" in flags["serial"]
    assert "--delta-correction=none" in flags["noheloco"]
    assert "--sync-interval-steps=0.0" in flags["unthrottled"]
    assert {"--outer-lr=1.0", "--outer-momentum=0.0", "--delta-correction=none"} <= set(
        flags["direct-rda"]
    )
    assert ARMS["q4"].dtype == "q4"
    assert ARMS["alpha0"].learner == ("--merge-alpha=0",)
    assert ARMS["strided"].learner == ("--fragment-pattern=strided",)
    assert ARMS["iso"].learner == ("--matrix-merge=iso",)


def test_each_seed_has_one_baseline_per_number_of_learners() -> None:
    cases = plan([ARMS["m2"], ARMS["m4"], ARMS["q4"]], [0, 5])
    assert [case.key for case in cases] == [
        "baseline-m2/seed0", "baseline-m4/seed0", "m2/seed0", "m4/seed0", "q4/seed0",
        "baseline-m2/seed5", "baseline-m4/seed5", "m2/seed5", "m4/seed5", "q4/seed5",
    ]  # fmt: skip


def test_the_identity_is_the_sizes_and_the_text() -> None:
    assert identity(SIZES, "a") == identity(replace(SIZES), "a")
    assert identity(SIZES, "a") != identity(SIZES, "b")
    assert identity(SIZES, "a") != identity(replace(SIZES, lr=0.1), "a")


# -- results -----------------------------------------------------------------------------------


def test_a_finished_record_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path, "i", resume=False)
    results.add(RECORD)
    results.add(replace(BASELINE, passed=False, violations=("why",)))
    results.close()
    again = Results(path, "i", resume=True)
    assert again.finished("m2/seed0")
    assert not again.finished("baseline-m2/seed0")
    assert not again.finished("m4/seed0")
    again.add(BASELINE)  # a failed one that passes now: the last line counts
    assert again.of(["baseline-m2/seed0", "m4/seed0", "m2/seed0"]) == [BASELINE, RECORD]
    again.close()
    assert len(path.read_text().splitlines()) == 3


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(RECORD.to_line() + BASELINE.to_line()[:40])
    results = Results(path, "i", resume=True)
    assert not results.finished(BASELINE.key)
    results.add(BASELINE)
    results.close()
    assert [parse_line(line).key for line in path.read_bytes().splitlines()] == [
        "m2/seed0", "baseline-m2/seed0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "resume", "why"),
    [
        (RECORD.to_line(), False, "go on with --resume"),
        (replace(RECORD, identity="other").to_line(), True, "another configuration"),
        (b"{}\n", True, "line 1"),
        (b"no json\n" + RECORD.to_line(), True, "line 1"),
        (RECORD.to_line() + b'{"format":"yeto-budget-results-v1"}\n', True, "line 2"),
    ],
)
def test_a_file_that_cannot_be_continued(
    tmp_path: Path, content: bytes, resume: bool, why: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    with pytest.raises(ResultsRefused, match=why):
        Results(path, "i", resume=resume)
    assert path.read_bytes() == content


def test_a_record_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(RECORD, held_out_loss=float("nan")).to_line()


def test_refused_starts_of_the_program(tmp_path: Path, capsys) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(RECORD.to_line())
    assert main(["--output", str(tmp_path), "--arms", "m2"]) == 2
    assert main(["--output", str(tmp_path), "--arms", "m2", "--resume"]) == 2
    assert "another configuration" in capsys.readouterr().out
    for flags in (["--arms", "m3"], ["--seeds", "-1"], ["--steps", "0"], ["--lr", "nan"]):
        with pytest.raises(SystemExit) as caught:
            main(flags)
        assert caught.value.code == 2


# -- summary -----------------------------------------------------------------------------------


def test_summary_and_report() -> None:
    failed = replace(RECORD, key="q4/seed0", name="q4", passed=False, violations=("C76: x",))
    document = summary_document([BASELINE, RECORD, failed], ["m4/seed0"], SIZES, "i")
    assert not document["passed"]
    assert document["failed"] == ["q4/seed0"]
    assert document["missing"] == ["m4/seed0"]
    assert [(arm["name"], arm["mean_gap"]) for arm in document["arms"]] == [
        ("m2", 0.5), ("q4", None),
    ]  # fmt: skip
    json.dumps(document, allow_nan=False)
    text = report_text([BASELINE, RECORD, failed], ["m4/seed0"], SIZES)
    assert "| m2 | 2 | 1 of 1 | 3.0000 | 2.5000 | +0.5000 | 7 | same bits |" in text
    assert "**1 runs failed, 1 are missing.**" in text
    assert "* C76: x" in text
    assert "No round" not in text
    early = report_text([replace(RECORD, cutoff_step=0)], [], SIZES)
    assert "No round was committed before the cutoff of m2/seed0" in early
    assert {row[0]: row[1] for row in rows([BASELINE, RECORD, failed])} == {
        "budget_runs_passed": 2,
        "budget_loss_m2": 3.0,
        "budget_gap_m2": 0.5,
        "budget_rounds_m2": 7,
    }
    assert summary_document([BASELINE, RECORD], [], SIZES, "i")["passed"]
    assert not summary_document([], [], SIZES, "i")["passed"]


def test_a_baseline_that_failed_gives_no_gap() -> None:
    (arm,) = summarise([replace(BASELINE, passed=False), RECORD])
    assert (arm.mean_loss, arm.mean_gap) == (3.0, None)


# -- the replay --------------------------------------------------------------------------------

LAYOUT = NamedLayout(
    (
        NamedFragment(MergeMode.AVG, (TensorSpec("e", (3,)), TensorSpec("n", ()))),
        NamedFragment(MergeMode.RDA, (TensorSpec("w", (2, 2)),)),
    )
)
WANTED = expected(ARMS["m2"], SIZES, LAYOUT.fingerprint, 2, "x")
PLAIN = replace(ARMS["direct-rda"], dtype="f32")


def states(*values: list[float]) -> list[FragmentState]:
    return [FragmentState(1, torch.tensor(v), torch.zeros(len(v))) for v in values]


def test_the_replay_merges_frozen_minus_global() -> None:
    """L42, N5, N7: with rate 1 and no momentum an averaged fragment becomes the mean."""
    before = states([0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0])
    frozen = [
        {"e": torch.full((3,), base), "n": torch.tensor(base), "w": torch.full((2, 2), 5.0)}
        for base in (2.0, 4.0)
    ]
    after = replay(before, frozen, LAYOUT, PLAIN, WANTED)
    assert after[0].params.tolist() == pytest.approx([3.0] * 4)
    # Equal deltas: the radial mean is the delta itself.
    assert after[1].params.tolist() == pytest.approx([5.0] * 4)
    same = compare(after, after)
    assert (same.relative, same.bits_equal) == (0.0, True)
    assert check_replay(same) == []
    frozen[1]["n"] = torch.tensor(4.5)
    other = compare(replay(before, frozen, LAYOUT, PLAIN, WANTED), after)
    assert not other.bits_equal
    assert check_replay(other)[0].startswith("L42")


def test_the_replay_rounds_as_the_wire_does() -> None:
    """The base of a bf16 learner is the broadcast as it was received, not the f32 state."""
    before = states([1.001, 1.0, 1.0, 1.0], [1.0] * 4)
    frozen = [{"e": torch.ones(3), "n": torch.tensor(1.0), "w": torch.ones(2, 2)} for _ in range(2)]
    after = replay(before, frozen, LAYOUT, replace(PLAIN, dtype="bf16"), WANTED)
    assert after[0].params[0].item() == pytest.approx(1.001)  # bf16(1.001) = 1: the delta is 0


def test_a_learner_that_froze_elsewhere_is_caught() -> None:
    assert check_frozen([(10, SIZES.tokens)] * 2, WANTED) == []
    found = check_frozen([(10, SIZES.tokens), (9, SIZES.tokens - 1)], WANTED)
    assert [text.split(" froze")[0] for text in found] == ["L40: learner 1"]
