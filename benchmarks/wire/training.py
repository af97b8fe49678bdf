"""What the machinery costs a training thread of the same process.

The thread repeats one step of matrix products; beside it a group is open and idle, or moves
messages without a pause, each way. Blocks with and without it take turns. Where cores are fewer
than busy threads most of the slowdown is theirs: `raw_apart` is that of bare sockets in processes
of their own, and the GIL rows are the time in which the thread neither ran nor waited for a core.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.report import Report, median
from benchmarks.wire.apart import Apart
from benchmarks.wire.ends import Pair, Setup
from benchmarks.wire.product import NearGroups
from benchmarks.wire.ways import NEAR

STREAMS = 4
BLOCK_S = 0.6
BLOCKS = 5
WIDTH = 384
_SCHEDULED = Path("/proc/self/schedstat")
"""Linux only."""


def slowdown(report: Report, pipe: Connection, size: int) -> None:
    """Rows for an idle link, and for messages of `size` bytes in and out."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as other:
        for kind in ("push", "bcast"):
            setup = Setup(kind, size, STREAMS)
            pair = other.submit(Pair, pipe, setup, NEAR[kind]).result()
            other.submit(pair.transfer).result()
            if kind == "push":
                _report(
                    report,
                    "training_slowdown_idle",
                    other,
                    partial(_repeat, pair, rest=True),
                    "at most 1",
                )
            name = {"push": "out", "bcast": "in"}[kind]
            note = "the aim is 10 with a core for each; compare with raw_apart"
            _report(report, f"training_slowdown_{name}", other, partial(_repeat, pair), note)
            other.submit(pair.close).result()
        apart = Apart(Setup("raw", size, STREAMS))
        note = "bare sockets in other processes"
        move = partial(apart.transfer_for, BLOCK_S)
        _report(report, "training_slowdown_raw_apart", other, move, note)
        apart.close()


def _report(
    report: Report,
    metric: str,
    other: ThreadPoolExecutor,
    work: Callable[[], object],
    note: str,
) -> None:
    alone: list[float] = []
    beside: list[float] = []
    slept = 0.0
    for _ in range(BLOCKS):
        alone += _steps(BLOCK_S)
        running = other.submit(work)
        before = _slept()
        beside += _steps(BLOCK_S)
        slept += _slept() - before
        running.result()
    extra = 100 * (sum(beside) / len(beside) / (sum(alone) / len(alone)) - 1)
    text = f"{note}; a step is {median(alone) * 1e3:.1f} ms, {median(beside) * 1e3:.1f} beside it"
    report.add(metric, extra, "%", text)
    if _SCHEDULED.exists():
        waited = 100 * slept / len(beside) / (sum(alone) / len(alone))
        text = "of a step alone, neither running nor waiting for a core"
        report.add(metric.replace("slowdown", "gil_wait"), waited, "%", text)


def _slept() -> float:
    """A clock of this thread that stands still while it runs or waits for a core."""
    if not _SCHEDULED.exists():
        return 0.0
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    running, queued, _ = path.read_text().split()
    return time.perf_counter() - (int(running) + int(queued)) / 1e9


def _repeat(pair: Pair, *, rest: bool = False) -> None:
    """Move messages for a block's time, or let the group's loop run with nothing to do."""
    end = time.perf_counter() + BLOCK_S
    while time.perf_counter() < end:
        if rest:
            _rest(pair)
        else:
            pair.transfer()


def _steps(seconds: float) -> list[float]:
    """Times of training steps."""
    weight = torch.ones(WIDTH, WIDTH)
    values = torch.ones(WIDTH, WIDTH)
    taken = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        for _ in range(10):
            values = torch.tanh(values @ weight)
        taken.append(time.perf_counter() - start)
    return taken


def _rest(pair: Pair) -> None:
    """Let a group's loop run for a moment with nothing to do."""
    if isinstance(pair.end, NearGroups):
        pair.end.runner.run(asyncio.sleep(BLOCK_S / 4))
