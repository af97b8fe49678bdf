"""How fast rounds are merged, beside the memory bandwidth of the same machine in the same minute.

    python -m benchmarks.merge [--quick] [--json FILE]

The floor of a merge is the time a plain copy on all cores would take to move its bytes once: every
payload in its wire dtype, old and new parameters, old and new momentum. Copy and merge alternate,
and each figure is the median of the ratios, so that other load on the machine hits both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import MIB, Report, benchmark_parser, current_rss, median, peak_rss
from benchmarks.report import reset_peak_rss as forget_peak
from syncer.events import Member
from syncer.merge.blocks import available_cores
from syncer.merge.engine import merge_round
from syncer.merge.memory import ResultMemory
from syncer.merge.plan import MergeJob, MergeSettings, Response
from syncer.svd.pool import PoolSettings, SvdPool
from syncer.svd.scalar import ScalarSvd
from wire.dtypes import DType
from wire.layout import MergeMode, NumericFragment, numeric_fragment
from wire.tensors import decode_into, encode

LEARNERS = 4
WIDTH = 1024
COSINES = (-0.5, 0.1, 0.6, -0.05)
"""Of the learners' gradients to the momentum: all cases of N15."""
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """One way to merge, and the metric it is reported as."""

    mode: MergeMode
    dtype: DType
    corrected: bool

    @property
    def name(self) -> str:
        """As in avg_f32 or rda_bf16_corrected."""
        parts = [self.mode.name.lower(), self.dtype.label]
        return "_".join([*parts, "corrected"] if self.corrected else parts)


CASES = [
    Case(mode, dtype, corrected)
    for mode in (MergeMode.AVG, MergeMode.RDA)
    for dtype in DType
    for corrected in (False, True)
]
TARGETS = {"avg_f32": 1.6, "rda_bf16": 4.0, "rda_bf16_corrected": 6.0}


def main() -> None:
    """Measure and print."""
    options = benchmark_parser("Merge rounds beside the speed of memory.").parse_args()
    blocks, repeats = (1, 5) if options.quick else (2, 9)
    report = Report("merge")
    merges(report, transformer(blocks, 2**19 if options.quick else 2**23), repeats)
    codecs(report, repeats)
    iso(report, 512 if options.quick else 1024, repeats)
    report.finish(options.json)


def transformer(blocks: int, embedding: int) -> list[int]:
    """Tensor sizes of some transformer blocks of width 1024 and an embedding."""
    matrices = [WIDTH * WIDTH] * 4 + [4 * WIDTH * WIDTH] * 2
    return [embedding, *([*matrices, WIDTH, WIDTH] * blocks)]


def merges(report: Report, numels: Sequence[int], repeats: int) -> None:
    """Ratios of merges to their floor, and the memory of one."""
    numel = sum(numels)
    copy, copied = copier(max(numel, 16 * MIB))
    report.add("copy_bandwidth", copied / seconds_of(copy, repeats) / 1e9, "GB/s", "read + write")
    momentum, deltas = gradients(numel)
    params = torch.from_numpy(np.ones(numel, np.float32))
    for case in CASES:
        fragment = numeric_fragment(case.mode, numels)
        job = make_job(fragment, case, deltas, params, momentum)
        moved = LEARNERS * case.dtype.size(numel) + 16 * numel
        ratios, times = [], []
        memory = ResultMemory()
        merge = partial(merge_round, job, ScalarSvd(), memory=memory)
        merge()  # from then on results are written where retired ones lay, as in a running syncer
        for _ in range(repeats):
            floor = seconds_of(copy, 1) * moved / copied
            taken = seconds_of(merge, 1)
            ratios.append(taken / floor)
            times.append(taken)
        target = f", at most {TARGETS[case.name]}" if case.name in TARGETS else ""
        report.add(
            f"{case.name}_vs_floor",
            median(ratios),
            "x",
            f"{median(times) * 1e3:.0f} ms for {numel / 2**20:.0f} Mi parameters, "
            f"{LEARNERS} learners{target}",
        )
    peak_memory(report, numels, deltas, params, momentum)


def peak_memory(
    report: Report,
    numels: Sequence[int],
    deltas: Sequence[Tensor],
    params: Tensor,
    momentum: Tensor,
) -> None:
    """What the most demanding merge adds to the process, in f32 fragments."""
    case = Case(MergeMode.RDA, DType.BF16, corrected=True)
    job = make_job(numeric_fragment(case.mode, numels), case, deltas, params, momentum)
    before = current_rss()
    forget_peak()
    merge_round(job, ScalarSvd())
    added = peak_rss() - before
    fragment = 4 * sum(numels)
    limit = ((LEARNERS + 2) * fragment + 64 * MIB) / fragment
    report.add("merge_peak_fragments", added / fragment, "f32 fragments", f"at most {limit:.2f}")


def gradients(numel: int) -> tuple[Tensor, list[Tensor]]:
    """A momentum, and one learner delta for each of `COSINES`."""
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(numel, generator=generator)
    deltas = []
    for cosine in COSINES:
        delta = torch.randn(numel, generator=generator)
        delta.mul_((1 - cosine**2) ** 0.5).sub_(momentum, alpha=cosine).mul_(0.01)
        deltas.append(delta)
    return momentum.mul_(0.02), deltas


def make_job(
    fragment: NumericFragment,
    case: Case,
    deltas: Sequence[Tensor],
    params: Tensor,
    momentum: Tensor,
) -> MergeJob:
    """A job whose payloads lie in memory of their own, as received ones do."""
    responses = tuple(
        Response(Member(number, 1), received(encode(delta, case.dtype)), 1000 + number, 10)
        for number, delta in enumerate(deltas)
    )
    settings = MergeSettings(lr=0.7, momentum=0.9, heloco=case.corrected, equal_weights=False)
    return MergeJob(fragment, case.dtype, responses, params, momentum, settings)


def received(data: memoryview) -> memoryview:
    """A copy of `data`."""
    return np.array(np.frombuffer(data, np.uint8)).data


def codecs(report: Report, repeats: int) -> None:
    """q4 beside memcpy, in cache; by the processor time of this one thread."""
    count = 2**16
    rounds = 64
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    payload = encode(values, DType.Q4)
    out = np.empty(count, np.float32)
    source = values.numpy()
    works: list[tuple[str, Callable[[], object], str]] = [
        ("memcpy", lambda: np.copyto(out, source), "f32, in cache"),
        ("q4_decode", lambda: decode_into(payload, DType.Q4, 0, out), "at least 300"),
        ("q4_encode", lambda: encode(values, DType.Q4), "at least 150"),
    ]
    for name, work, note in works:
        work()

        rates = []
        for _ in range(repeats):
            start = time.thread_time()
            for _ in range(rounds):
                work()
            rates.append(count * rounds / (time.thread_time() - start) / 1e6)
        report.add(f"{name}_mvalues_per_core", median(rates), "M values/s", note)


def iso(report: Report, size: int, repeats: int) -> None:
    """The SVD pool beside the bare SVD of the same matrix, both in f64 (N14)."""
    settings = PoolSettings(("cpu",), sys.executable, 16, DEADLINE_S, DEADLINE_S, DEADLINE_S)
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(2))
    exact = matrix.double()
    pool = SvdPool(settings)
    try:
        pool.start()
        pool.flatten([matrix])
        torch.linalg.svd(exact, full_matrices=False)
        ratios = []
        for _ in range(repeats):
            bare = seconds_of(lambda: torch.linalg.svd(exact, full_matrices=False), 1)
            ratios.append(seconds_of(lambda: pool.flatten([matrix]), 1) / bare)
    finally:
        pool.close()
    report.add(
        "iso_torch_svd_vs_bare", median(ratios), "x", f"{size} x {size}, f64, at most 1.2 at 1024"
    )


def copier(floats: int) -> tuple[Callable[[], None], int]:
    """A copy of that many f32 on all cores, and the bytes it moves."""
    source: NDArray[np.float32] = np.ones(floats, np.float32)
    target: NDArray[np.float32] = np.ones(floats, np.float32)
    cores = available_cores()
    edges = [floats * i // cores for i in range(cores + 1)]
    parts = [slice(*pair) for pair in pairwise(edges)]
    threads = ThreadPoolExecutor(cores)

    def copy() -> None:
        list(threads.map(lambda part: np.copyto(target[part], source[part]), parts))

    return copy, 8 * floats


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `work`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


if __name__ == "__main__":
    main()
