"""From records to `summary.json`, `report.md` and the rows of the benchmark table; no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.budget.plan import ARMS, Sizes, baseline_name
from benchmarks.budget.results import Record

FORMAT = "yeto-budget-summary-v1"


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over its seeds; losses in nats per byte, means over the records that passed.

    Attributes:
        gaps: per seed, held-out loss minus that of the baseline of the same seed.
        bits_equal: every replay of the consolidation gave the same bits.
    """

    name: str
    learners: int
    meaning: str
    runs: int
    passed: int
    losses: tuple[float, ...]
    baselines: tuple[float, ...]
    gaps: tuple[float, ...]
    cutoff_steps: tuple[int, ...]
    wall_s: tuple[float, ...]
    bits_equal: bool

    @property
    def mean_loss(self) -> float | None:
        """Over the seeds, None when none passed."""
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def mean_baseline(self) -> float | None:
        """Of the seeds that have both."""
        return statistics.fmean(self.baselines) if self.baselines else None

    @property
    def mean_gap(self) -> float | None:
        """Of the seeds that have both."""
        return statistics.fmean(self.gaps) if self.gaps else None


def summarise(records: Sequence[Record]) -> list[ArmSummary]:
    """Arms in the order of their first record; a baseline counts only if it passed."""
    baselines = {record.key: record for record in records if record.name not in ARMS}
    names = dict.fromkeys(record.name for record in records if record.name in ARMS)
    return [_summarise(name, [r for r in records if r.name == name], baselines) for name in names]


def _summarise(name: str, records: Sequence[Record], baselines: Mapping[str, Record]) -> ArmSummary:
    passed = [record for record in records if record.passed]
    pairs = [
        (record.held_out_loss, base.held_out_loss)
        for record in passed
        if (base := baselines.get(f"{baseline_name(record.learners)}/seed{record.seed}"))
        is not None
        and base.passed
    ]
    both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    return ArmSummary(
        name=name,
        learners=records[0].learners,
        meaning=ARMS[name].meaning,
        runs=len(records),
        passed=len(passed),
        losses=tuple(r.held_out_loss for r in passed if r.held_out_loss is not None),
        baselines=tuple(theirs for _, theirs in both),
        gaps=tuple(ours - theirs for ours, theirs in both),
        cutoff_steps=tuple(r.cutoff_step for r in passed if r.cutoff_step is not None),
        wall_s=tuple(r.wall_s for r in passed),
        bits_equal=all(record.bits_equal is True for record in passed) and bool(passed),
    )


def summary_document(
    records: Sequence[Record], missing: Sequence[str], sizes: Sizes, identity: str
) -> dict[str, Any]:
    """The content of `summary.json`."""
    return {
        "format": FORMAT,
        "identity": identity,
        "sizes": asdict(sizes),
        "passed": not missing and bool(records) and all(record.passed for record in records),
        "missing": list(missing),
        "failed": [record.key for record in records if not record.passed],
        "arms": [
            {
                **asdict(arm),
                "mean_loss": arm.mean_loss,
                "mean_baseline": arm.mean_baseline,
                "mean_gap": arm.mean_gap,
            }
            for arm in summarise(records)
        ],
    }


def report_text(records: Sequence[Record], missing: Sequence[str], sizes: Sizes) -> str:
    """The content of `report.md`; the picture is `report.png` beside it."""
    failed = [record for record in records if not record.passed]
    verdict = "All checks of all runs hold."
    if failed or missing:
        verdict = f"**{len(failed)} runs failed, {len(missing)} are missing.**"
    alone = [record.key for record in records if record.cutoff_step == 0]
    lines = [
        "# Equal budgets: cutoff, consolidation and a synchronous baseline",
        "",
        f"{verdict} Every learner trains exactly {sizes.steps} steps of {sizes.step_tokens} "
        f"tokens; the baseline of M learners trains {sizes.steps} steps on the union of their "
        "batches. Losses are held-out nats per byte, lower is better.",
        "",
        *(
            [
                f"No round was committed before the cutoff of {', '.join(alone)}: give more steps.",
                "",
            ]
            if alone
            else []
        ),
        "![held-out losses](report.png)",
        "",
        "| arm | M | passed | held-out | baseline | gap | rounds before the cutoff | replay | "
        "what it is |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
        *(_row(arm) for arm in summarise(records)),
    ]
    for record in failed:
        lines += ["", f"## Failed: {record.key}", "", *(f"* {text}" for text in record.violations)]
    if missing:
        lines += ["", "## Missing", "", *(f"* {key}" for key in missing)]
    return "\n".join([*lines, ""])


def _row(arm: ArmSummary) -> str:
    rounds = _span(arm.cutoff_steps)
    replayed = "same bits" if arm.bits_equal else "within tolerance" if arm.passed else "-"
    return (
        f"| {arm.name} | {arm.learners} | {arm.passed} of {arm.runs} | {_number(arm.mean_loss)} | "
        f"{_number(arm.mean_baseline)} | {_number(arm.mean_gap, sign=True)} | {rounds} | "
        f"{replayed} | {arm.meaning} |"
    )


def rows(records: Sequence[Record]) -> Iterable[tuple[str, float, str, str]]:
    """Metric, value, unit, note for the table that all benchmarks share."""
    good = sum(record.passed for record in records)
    yield "budget_runs_passed", good, "runs", f"of {len(records)}"
    for arm in summarise(records):
        if arm.mean_loss is not None:
            yield f"budget_loss_{arm.name}", arm.mean_loss, "nats/byte", f"{arm.passed} seeds"
        if arm.mean_gap is not None:
            yield f"budget_gap_{arm.name}", arm.mean_gap, "nats/byte", "over the baseline"
        if arm.cutoff_steps:
            rounds = statistics.fmean(arm.cutoff_steps)
            yield f"budget_rounds_{arm.name}", rounds, "rounds", "before the cutoff"


def _number(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.4f}" if sign else f"{value:.4f}"


def _span(values: Sequence[int]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
