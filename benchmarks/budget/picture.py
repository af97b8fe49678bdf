"""The picture of a report: per arm the held-out loss of every seed beside its baseline."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.budget.summary import ArmSummary
from benchmarks.demo.picture import COLOURS, GREY, STYLE


def draw(arms: list[ArmSummary], path: Path) -> None:
    """Write a PNG; arms without a run that passed have an empty place."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.0, 1.1 * len(arms) + 2), 4.6), dpi=110, layout="constrained")
        axes = figure.subplots()
        for place, arm in enumerate(arms):
            axes.plot(
                [place - 0.12] * len(arm.baselines),
                arm.baselines,
                "D",
                color=GREY,
                markersize=6,
                alpha=0.8,
                label=None if place else "synchronous baseline",
            )
            axes.plot(
                [place + 0.12] * len(arm.losses),
                arm.losses,
                "o",
                color=COLOURS[0],
                markersize=7,
                alpha=0.8,
                label=None if place else "after the consolidation",
            )
        axes.set_xticks(range(len(arms)), [arm.name for arm in arms], rotation=25, ha="right")
        axes.set_xlim(-0.6, max(len(arms) - 0.4, 0.6))
        axes.set_ylabel("held-out loss, nats per byte")
        axes.set_title("Equal budgets: every seed of every arm")
        axes.grid(axis="y")
        axes.legend(frameon=False)
        figure.savefig(path)
