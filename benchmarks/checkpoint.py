"""What a checkpoint costs: saving at every commit, and loading (issue "Durability").

    every_commit_bytes_fragments  bytes that the kernel counts for one save, in fragments
    every_commit_time_vs_full     seconds of one save over seconds of a full rewrite
    load_vs_read                  speed of a verified load over plainly reading the same file

A fragment is its params and momentum. Saves are steady state: every commit, one new fragment.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.report import MIB, Report, benchmark_parser, median
from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from checkpoint.store import CheckpointStore

FRAGMENTS = 16
MODEL_BYTES = 512 * MIB
QUICK_MODEL_BYTES = 64 * MIB
WARMUP_STEPS = 3
"""Saves until two complete files exist and the older one is this process's own (K12)."""
MEASURED_STEPS = 8
FULL_WRITES = 3
LOADS = 5


class Run:
    """A model that commits one fragment at a time and is saved at every commit."""

    def __init__(self, path: Path, model_bytes: int) -> None:
        numel = model_bytes // 4 // FRAGMENTS
        generator = torch.Generator().manual_seed(0)
        self.store = CheckpointStore(path)
        self.store.acquire()
        self._ledger = {0: LedgerEntry(1, 24, 49152)}
        self.snapshot = self._cut(
            0,
            tuple(
                FragmentState(0, torch.randn(numel, generator=generator), torch.zeros(numel))
                for _ in range(FRAGMENTS)
            ),
        )

    def commit(self) -> None:
        """One outer step: new tensors for the fragment whose turn it is."""
        step = self.snapshot.global_step + 1
        index = (step - 1) % FRAGMENTS
        fragments = list(self.snapshot.fragments)
        old = fragments[index]
        fragments[index] = FragmentState(step, old.params * 0.5, old.params * 0.25)
        self.snapshot = self._cut(step, tuple(fragments))

    def save(self, *, patch: bool) -> float:
        """Seconds of one durable save."""
        start = time.perf_counter()
        self.store.save(self.snapshot, patch=patch, last=False)
        return time.perf_counter() - start

    def _cut(self, step: int, fragments: tuple[FragmentState, ...]) -> Snapshot:
        return Snapshot(0, b"f" * 32, b"c" * 32, step, fragments, self._ledger)


def written_bytes() -> int:
    """Bytes this process made dirty in the page cache of a disk, as the kernel counts them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "write_bytes":
            return int(value)
    raise LookupError("/proc/self/io has no write_bytes")


def measure_saves(report: Report, run: Run, model_bytes: int) -> None:
    """Patched saves of every commit, then full rewrites of the same state."""
    for _ in range(WARMUP_STEPS):
        run.save(patch=True)
        run.commit()
    run.save(patch=True)
    patched = []
    before = written_bytes()
    for _ in range(MEASURED_STEPS):
        run.commit()
        patched.append(run.save(patch=True))
    fragment_bytes = 2 * model_bytes / FRAGMENTS
    per_step = (written_bytes() - before) / MEASURED_STEPS
    full = [run.save(patch=False) for _ in range(FULL_WRITES)]
    note = f"{fragment_bytes / MIB:.0f} MiB a fragment, {MEASURED_STEPS} steps"
    report.add("every_commit_bytes_fragments", per_step / fragment_bytes, "fragments", note)
    report.add("every_commit_seconds", median(patched), "s", "median save of one commit")
    report.add("full_rewrite_seconds", median(full), "s", f"{2 * model_bytes / MIB:.0f} MiB")
    report.add("every_commit_time_vs_full", median(patched) / median(full), "ratio")


def measure_loads(report: Report, path: Path) -> None:
    """Verified loads and plain reads of one file, in turn.

    Both fill new memory. Plain is one `read` of the whole file, in one thread. The page cache is
    asked to drop the file before each, as after a restart of the machine.
    """
    size = path.stat().st_size
    store = CheckpointStore(path)
    reads, loads = [], []
    for _ in range(LOADS):
        reads.append(_timed_cold(path, path.read_bytes))
        loads.append(_timed_cold(path, lambda: store.load(0, None)))
    if not store.load(0, None).verified:
        raise SystemExit("the loaded checkpoint was not verified")
    report.add("read_mib_per_s", size / MIB / median(reads), "MiB/s", "whole file, one thread")
    report.add("load_mib_per_s", size / MIB / median(loads), "MiB/s", "digests and values checked")
    ratios = [read / load for read, load in zip(reads, loads, strict=True)]
    report.add("load_vs_read", median(ratios), "ratio", f"median of {LOADS} pairs")


def _timed_cold(path: Path, work: Callable[[], object]) -> float:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    return seconds


def main() -> None:
    """Run all measurements in a fresh folder on the disk of `--dir`."""
    parser = benchmark_parser("Cost of durable checkpoints.")
    parser.add_argument("--dir", type=Path, default=Path(), help="folder on the disk to measure")
    options = parser.parse_args()
    model_bytes = QUICK_MODEL_BYTES if options.quick else MODEL_BYTES
    report = Report(f"checkpoint: {FRAGMENTS} fragments, {model_bytes // MIB} MiB model")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.dir) as folder:
        path = Path(folder) / "state.ckpt"
        run = Run(path, model_bytes)
        measure_saves(report, run, model_bytes)
        run.store.release()
        del run
        measure_loads(report, path)
    report.finish(options.json)


if __name__ == "__main__":
    main()
