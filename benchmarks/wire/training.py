"""What the machinery costs a training thread of the same process.

The thread repeats one step of matrix products; beside it a group is open and idle, or moves
messages without a pause, each way. Blocks with and without it take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.report import Report, median
from benchmarks.wire.ends import Pair, Setup
from benchmarks.wire.product import NearGroups
from benchmarks.wire.ways import NEAR

STREAMS = 4
BLOCK_S = 0.6
BLOCKS = 5
WIDTH = 384


def slowdown(report: Report, pipe: Connection, size: int) -> None:
    """Rows for an idle link, and for messages of `size` bytes in and out."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as other:
        for kind in ("push", "bcast"):
            setup = Setup(kind, size, STREAMS)
            pair = other.submit(Pair, pipe, setup, NEAR[kind]).result()
            other.submit(pair.transfer).result()
            if kind == "push":
                _report(report, "training_slowdown_idle", other, partial(_rest, pair), "at most 1")
            name = {"push": "out", "bcast": "in"}[kind]
            note = "the aim is 10; here the sender, the receiver and training share two cores"
            _report(report, f"training_slowdown_{name}", other, pair.transfer, note)
            other.submit(pair.close).result()


def _report(
    report: Report,
    metric: str,
    other: ThreadPoolExecutor,
    work: Callable[[], object],
    note: str,
) -> None:
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(BLOCKS):
        alone += _steps(BLOCK_S)
        end = time.perf_counter() + BLOCK_S
        running = other.submit(_repeat, work, end)
        beside += _steps(BLOCK_S)
        running.result()
    extra = 100 * (sum(beside) / len(beside) / (sum(alone) / len(alone)) - 1)
    text = f"{note}; a step is {median(alone) * 1e3:.1f} ms, {median(beside) * 1e3:.1f} beside it"
    report.add(metric, extra, "%", text)


def _repeat(work: Callable[[], object], end: float) -> None:
    while time.perf_counter() < end:
        work()


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
