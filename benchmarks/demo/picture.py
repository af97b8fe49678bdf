"""The picture of a run: held-out loss against own steps, and who answered which round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.demo.record import LearnerRecord, RunRecord, ids

COLOURS = ("#3b6fb6", "#d9772b", "#3f9b6c", "#8f5fb0", "#b0493f", "#7a6a58")
MERGED = "#1d1d1f"
ALONE = "#9a9a9f"
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


def draw(run: RunRecord, alone: LearnerRecord | None, path: Path) -> None:
    """Writes a PNG of a run in which every learner was evaluated and rounds were committed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 7.2), dpi=110, layout="constrained")
        losses, rounds = figure.subplots(2, 1, height_ratios=[1.7, 1])
        _draw_losses(losses, run, alone)
        _draw_rounds(rounds, run)
        figure.savefig(path)


def _draw_losses(axes: Axes, run: RunRecord, alone: LearnerRecord | None) -> None:
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
    end = max(learner.local_step for learner in run.learners.values())
    merged = next(iter(run.learners.values())).last_loss
    if alone is not None:
        axes.plot(
            [step for _, step, _ in alone.held_out],
            [loss for _, _, loss in alone.held_out],
            color=ALONE,
            linestyle="--",
            linewidth=1.6,
            label=f"one learner alone: {alone.last_loss:.3f}",
        )
    axes.plot(
        [end],
        [merged],
        color=MERGED,
        marker="*",
        markersize=15,
        linestyle="none",
        label=f"merged model: {merged:.3f}",
        zorder=5,
    )
    axes.set_title("Held-out loss")
    axes.set_xlabel("optimizer steps of each learner")
    axes.set_ylabel("nats per byte")
    axes.grid(axis="y")
    axes.legend(frameon=False)


def _draw_rounds(axes: Axes, run: RunRecord) -> None:
    start = run.rounds[0].ts - run.rounds[0].ms / 1000
    names = list(run.learners)
    for commit in run.rounds:
        end = commit.ts - start
        for learner_id in range(len(names)):
            if learner_id in ids(commit.responded):
                colour = COLOURS[learner_id % len(COLOURS)]
                axes.plot([end], [learner_id], "|", color=colour, markersize=22, alpha=0.9)
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
