"""What joining a run costs the training thread, and how much memory it takes.

`python -m benchmarks.stall [--quick] [--json FILE]`. One real syncer process over loopback, and
this process as its only learner.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.report import (
    MIB,
    Report,
    benchmark_parser,
    current_rss,
    median,
    peak_rss,
    reset_peak_rss,
)
from benchmarks.swarm import SyncerProcess
from learner import Learner, LearnerConfig
from learner.tasks.base import TaskSettings
from learner.tasks.bytes_lm import BytesLM

H = 24
FRAGMENTS = 8
F32_BYTES = 4
PAUSE_S = 0.005
"""Between two boundaries of the large model: the others' time, as a training step would be."""
WAIT_S = 300.0


def step_cost(report: Report, directory: Path, blocks: int, settings: TaskSettings) -> None:
    """The built-in task at H = 24; blocks of H steps with and without `sync.step` take turns."""
    task = BytesLM(settings)
    pacing = ("--sync-interval-steps", str(H))
    training: list[float] = []
    plain: list[float] = []
    boundaries: list[float] = []
    with SyncerProcess(directory, *pacing) as syncer:
        config = LearnerConfig(connect=f"127.0.0.1:{syncer.port}", fragments=FRAGMENTS)
        with Learner(task.model, config, optimizer=task.optimizer) as sync:
            # Until the first rounds are over, in which everything is used for the first time.
            while sync.counters.merges_applied < 2 * len(sync.layout):
                sync.step(tokens=task.train_step().tokens)
            merged = sync.counters.merges_applied
            for _ in range(blocks):
                for _ in range(H):
                    start = time.perf_counter()
                    tokens = task.train_step().tokens
                    trained = time.perf_counter()
                    sync.step(tokens=tokens)
                    training.append(trained - start)
                    boundaries.append(time.perf_counter() - trained)
                for _ in range(H):
                    start = time.perf_counter()
                    task.train_step()
                    plain.append(time.perf_counter() - start)
            merged = sync.counters.merges_applied - merged
    steps = len(boundaries)
    note = (
        f"time inside sync.step over time inside the training step, {steps} steps of "
        f"{median(training) * 1e3:.0f} ms, {merged / len(sync.layout) * H / steps:.2f} merges per "
        f"fragment and {H} steps"
    )
    report.add("step_cost_percent_h24", 100 * sum(boundaries) / sum(training), "%", note)
    report.add("step_p50_us", median(boundaries) * 1e6, "us", "one call of sync.step")
    report.add("step_max_ms", max(boundaries) * 1e3, "ms")
    synced = [a + b for a, b in zip(training, boundaries, strict=True)]
    report.add(
        "slowdown_percent_h24",
        100 * (median(synced) / median(plain) - 1),
        "%",
        "median step with sync over median step without, its threads and the syncer included",
    )


class Wide(nn.Module):
    """As many equal matrices as there are fragments."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        rows = numel // FRAGMENTS // 1000
        self.parts = nn.ParameterList(torch.randn(rows, 1000) for _ in range(FRAGMENTS))

    @property
    def numel(self) -> int:
        """Of all parameters."""
        return sum(parameter.numel() for parameter in self.parts)

    @property
    def fragment(self) -> int:
        """Elements of one fragment."""
        return self.numel // FRAGMENTS


@dataclass
class Holds:
    """Seconds for which single pushes and applies held the training thread, and plain copies."""

    pushes: list[float] = field(default_factory=list)
    applies: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return min(len(self.pushes), len(self.applies))

    def boundary(self, sync: Learner) -> None:
        """One boundary; counts when exactly one fragment was pushed or applied."""
        start = time.perf_counter()
        info = sync.step(tokens=1)
        seconds = time.perf_counter() - start
        if len(info.pushed) + len(info.applied) == 1:
            (self.pushes if info.pushed else self.applies).append(seconds)
        time.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides how many fragments are under way at once; `suffix` names its rows."""

    suffix: str
    wire_dtype: str = "bf16"
    pipeline: int = 1
    feedback: bool = False


SETTINGS = (
    Setting(""),
    Setting("_p2", pipeline=2),
    Setting("_f32", "f32"),
    Setting("_f32_p2", "f32", pipeline=2),
    Setting("_q4_p2", "q4", pipeline=2),
    Setting("_feedback", feedback=True),
)
HELD = (Setting("_feedback", feedback=True), Setting(""))


def hold(report: Report, directory: Path, numel: int, rounds: int) -> None:
    """Time that a push or an apply holds the training thread, against a copy of the fragment."""
    worst = 0.0
    for setting in HELD:
        folder = made(directory, f"hold{setting.suffix}")
        worst = max(worst, hold_of(report, folder, numel, rounds, setting))
    report.add("hold_vs_memcpy", worst, "x", "the largest of these four")


def hold_of(report: Report, directory: Path, numel: int, rounds: int, setting: Setting) -> float:
    """The larger of push and apply over a copy."""
    model = Wide(numel)
    target = torch.zeros(model.fragment)
    sources = itertools.cycle([part.detach().view(-1) for part in model.parts])
    holds = Holds()
    with large_run(directory, model, setting) as sync:
        while len(holds) < rounds * FRAGMENTS:
            holds.boundary(sync)
            start = time.perf_counter()
            target.copy_(next(sources))
            holds.copies.append(time.perf_counter() - start)
    copy, push, apply = median(holds.copies), median(holds.pushes), median(holds.applies)
    note = f"{numel / 1e6:.0f} M parameters, {FRAGMENTS} fragments; a copy is {copy * 1e3:.1f} ms"
    for what, seconds, all_of in (("push", push, holds.pushes), ("apply", apply, holds.applies)):
        worst = f"{note}; worst {max(all_of) / copy:.1f}"
        report.add(f"{what}_vs_memcpy{setting.suffix}", seconds / copy, "x", worst)
    return max(push, apply) / copy


def memory(report: Report, directory: Path, numel: int, setting: Setting) -> None:
    """Peak resident size over that of the model alone, in a process of its own."""
    fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with fresh:
        start, peak = fresh.submit(peak_extra, directory, numel, setting).result(WAIT_S)
    anchors, size = F32_BYTES * numel, F32_BYTES * numel // FRAGMENTS
    note = f"model {anchors / MIB:.0f} MiB; at the start {start / MIB:.0f} MiB"
    report.add(f"peak_extra_mib{setting.suffix}", peak / MIB, "MiB", note)
    note = (
        f"f32 fragments of {size / MIB:.0f} MiB beyond one copy of the anchors; "
        f"{setting.wire_dtype}, open rounds: {setting.pipeline}"
    )
    if setting.feedback:
        note += f"; {FRAGMENTS} of them are the carried residuals, 1 or 2 those of open pushes"
    report.add(f"peak_extra_fragments{setting.suffix}", (peak - anchors) / size, "fragments", note)


def peak_extra(directory: Path, numel: int, setting: Setting) -> tuple[int, int]:
    """Bytes over the model alone: until the first rounds are over, and from then on."""
    torch.set_num_threads(1)
    # Libraries and compiled loops are no memory of the model's: load them before.
    with large_run(made(directory, "small"), Wide(1000 * FRAGMENTS), setting):
        pass
    model = Wide(numel)
    before = current_rss()
    reset_peak_rss()
    with large_run(directory, model, setting) as sync:
        start = peak_rss()
        reset_peak_rss()
        holds = Holds()
        merged = sync.counters.merges_applied
        while sync.counters.merges_applied < merged + 3 * FRAGMENTS:
            holds.boundary(sync)
        return start - before, peak_rss() - before


@contextmanager
def large_run(directory: Path, model: Wide, setting: Setting) -> Iterator[Learner]:
    """A learner that has been through its first rounds."""
    with SyncerProcess(directory, "--pipeline", str(setting.pipeline)) as syncer:
        config = LearnerConfig(
            connect=f"127.0.0.1:{syncer.port}",
            fragments=FRAGMENTS,
            wire_dtype=setting.wire_dtype,
            error_feedback=setting.feedback,
        )
        with Learner(model, config) as sync:
            give_up = time.monotonic() + WAIT_S
            while sync.counters.merges_applied < 2 * FRAGMENTS:
                if time.monotonic() > give_up:
                    raise RuntimeError(f"{sync.counters.merges_applied} merges in {WAIT_S:g} s")
                Holds().boundary(sync)
            yield sync


def made(folder: Path | str, name: str) -> Path:
    """A new folder in `folder`: a syncer starts in one of its own."""
    path = Path(folder) / name
    path.mkdir()
    return path


def main() -> None:
    """Parse the options, measure, report."""
    parser = benchmark_parser("What joining a run costs the training thread.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = TaskSettings(seed=0, learner_id=0, batch_size=2 if options.quick else 8)
    numel, rounds = (32_000_000, 2) if options.quick else (100_000_000, 3)
    report = Report("Learner: cost of a step boundary, and memory")
    with tempfile.TemporaryDirectory(prefix="yeto-stall-") as folder:
        step_cost(report, made(folder, "cost"), 2 if options.quick else 6, settings)
        hold(report, made(folder, "hold"), numel, rounds)
        for setting in SETTINGS:
            memory(report, made(folder, f"memory{setting.suffix}"), numel, setting)
    report.finish(options.json)


if __name__ == "__main__":
    main()
