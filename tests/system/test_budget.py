"""`python -m benchmarks.budget` with real processes: one tiny run that holds, one that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.budget.__main__ import main
from benchmarks.budget.results import Record, parse_line
from tests.system.training import TEXT

TINY = (
    "--arms=m2", "--seeds=3", "--steps=400", "--fragments=2", "--layers=1", "--width=16",
    "--heads=2", "--seq-len=16", "--batch-size=2", "--sync-interval-steps=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The program settles how many threads torch has; other tests want theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(folder: Path, *flags: str) -> int:
    text = folder / "text.txt"
    text.write_text(TEXT * 200)
    return main([*TINY, f"--data={text}", f"--output={folder / 'out'}", *flags])


def records(folder: Path) -> list[Record]:
    lines = (folder / "out" / "results.jsonl").read_bytes().splitlines()
    return [parse_line(line) for line in lines]


def test_cutoff_consolidation_and_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C70 to C76, L40 to L44, K25: two learners, two syncers on one endpoint, everything checked;
    a second start leaves out what is finished."""
    rows = tmp_path / "rows.json"
    assert run(tmp_path, f"--json={rows}") == 0, capsys.readouterr().out
    baseline, arm = records(tmp_path)
    assert (baseline.key, arm.key) == ("baseline-m2/seed3", "m2/seed3")
    assert arm.passed
    assert arm.violations == ()
    assert arm.tokens == baseline.tokens == 2 * 400 * 2 * 16
    assert arm.initial_loss == baseline.initial_loss
    assert arm.fragments == 2
    assert arm.bits_equal
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["passed"]
    assert [item["name"] for item in summary["arms"]] == ["m2"]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "All checks of all runs hold." in (out / "report.md").read_text()
    metrics = {row["metric"]: row["value"] for row in json.loads(rows.read_text())}
    assert metrics["budget_runs_passed"] == 2
    assert metrics["budget_gap_m2"] == pytest.approx(arm.held_out_loss - baseline.held_out_loss)

    before = (out / "results.jsonl").read_bytes()
    assert run(tmp_path) == 2  # a finished report is not overwritten
    assert run(tmp_path, "--resume") == 0
    assert (out / "results.jsonl").read_bytes() == before


def test_a_case_that_goes_wrong_is_a_failed_record(tmp_path: Path) -> None:
    """Nothing is skipped in silence: a learner that cannot start fails its case and the program."""
    assert run(tmp_path, "--heads=3") == 1
    baseline, arm = records(tmp_path)
    assert not baseline.passed
    assert "TaskError" in baseline.violations[0]
    assert not arm.passed
    assert "ended with exit code 2 before the cutoff" in arm.violations[0]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Failed: m2/seed3" in report
    assert not json.loads((tmp_path / "out" / "summary.json").read_text())["passed"]
