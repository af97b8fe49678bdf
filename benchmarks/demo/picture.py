"""The picture of a run: held-out loss against own steps, and who answered which round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.demo.record import RunRecord, ids

COLOURS = ("#3b6fb6", "#d9772b", "#3f9b6c", "#8f5fb0", "#b0493f", "#7a6a58")
MERGED = "#1d1d1f"
GREY = "#9a9a9f"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a8f",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e6e6ea",
    "xtick.color": "#505055",
    "ytick.color": "#505055",
}


def draw(run: RunRecord, path: Path) -> None:
    """Writes a PNG of a run in which every learner was evaluated and rounds were committed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 7.2), dpi=110, layout="constrained")
        losses, rounds = figure.subplots(2, 1, height_ratios=[1.7, 1])
        _draw_losses(losses, run)
        _draw_rounds(rounds, run)
        figure.savefig(path)


def _draw_losses(axes: Axes, run: RunRecord) -> None:
    for number, (name, learner) in enumerate(run.learners.items()):
        colour = COLOURS[number % len(COLOURS)]
        own = learner.held_out[:-1]  # the last one is the merged model's
        axes.plot(
            [step for _, step, _ in own],
            [loss for _, _, loss in own],
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            label=name.replace("-", " "),
        )
    if run.alone is not None:
        axes.plot(
            [step for _, step, _ in run.alone.held_out],
            [loss for _, _, loss in run.alone.held_out],
            color=GREY,
            linestyle="--",
            linewidth=1.6,
            label=f"one learner alone: {run.alone.loss_at(run.own_steps):.3f}",
        )
    axes.plot(
        [run.own_steps],
        [run.merged_loss],
        color=MERGED,
        marker="*",
        markersize=15,
        linestyle="none",
        label=f"merged model: {run.merged_loss:.3f}",
        zorder=5,
    )
    axes.set_title(f"Held-out loss (before training: {run.first_loss:.2f})")
    axes.set_ylim(*_loss_range(run))
    axes.set_xlabel("optimizer steps of each learner")
    axes.set_ylabel("nats per byte")
    axes.grid(axis="y")
    axes.legend(frameon=False)


def _loss_range(run: RunRecord) -> tuple[float, float]:
    """Leaves out the fall of the first few steps, which would flatten everything after it."""
    losses = [loss for learner in run.learners.values() for _, _, loss in learner.held_out]
    early = [
        learner.held_out[min(2, len(learner.held_out) - 1)][2] for learner in run.learners.values()
    ]
    low, high = min(losses), max(*early, run.merged_loss)
    margin = 0.08 * (high - low) or 0.1
    return low - margin, high + margin


def _draw_rounds(axes: Axes, run: RunRecord) -> None:
    start = run.rounds[0].ts - run.rounds[0].ms / 1000
    names = list(run.learners)
    for commit in run.rounds:
        end = commit.ts - start
        for learner_id in range(len(names)):
            if learner_id in ids(commit.responded):
                colour = COLOURS[learner_id % len(COLOURS)]
                axes.plot([end], [learner_id], "|", color=colour, markersize=22, markeredgewidth=1)
            elif learner_id in ids(commit.expected):
                axes.plot([end], [learner_id], "x", color="#c03030", markersize=7)
    count = len(run.rounds)
    answered = sum(len(commit.responded) for commit in run.rounds)
    asked = sum(len(commit.expected) for commit in run.rounds)
    axes.set_title(f"{count} rounds: {answered} of {asked} answers came in time (x = missed)")
    axes.set_yticks(range(len(names)), [name.replace("-", " ") for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("seconds since the first round began")
    axes.tick_params(axis="y", length=0)
