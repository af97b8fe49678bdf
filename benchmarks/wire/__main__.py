"""Measure and report; see the package's own text.

python -m benchmarks.wire [--quick] [--json FILE] [--only METRIC]
"""

from __future__ import annotations

import multiprocessing
import tempfile
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import MIB, Report, benchmark_parser, median
from benchmarks.wire.ends import Pair, Setup, take_turns
from benchmarks.wire.raw import SERVER_NAME
from benchmarks.wire.rounds import round_vs_floor
from benchmarks.wire.training import slowdown
from benchmarks.wire.ways import NEAR, far_main
from syncer.keys import create_all

CONTROL_BYTES = 25
"""A HEARTBEAT frame."""
WARM = 2


class Case(NamedTuple):
    """One row: a way of the product against the best of others, with the same bytes."""

    metric: str
    kind: str
    rivals: tuple[str, ...]
    streams: int
    wanted: float
    learners: int = 1
    tls: bool = False


BARE = ("raw", "raw-threads")
TUNED = ("tuned", "tuned-threads")
CASES = (
    Case("push_s4_vs_raw", "push", BARE, 4, 0.9),
    Case("push_s1_vs_raw", "push", BARE, 1, 0.85),
    Case("bcast_s4_vs_raw", "bcast", BARE, 4, 0.9),
    Case("push_s4_vs_tuned_raw", "push", TUNED, 4, 0.0),
    Case("bcast_s4_vs_tuned_raw", "bcast", TUNED, 4, 0.0),
    Case("push_s4_vs_streamreader", "push", ("streamreader",), 4, 3.0),
    Case("bcast_s4_vs_gloo", "bcast", ("gloo",), 4, 0.95),
    Case("fanout8_vs_raw", "bcast", BARE, 1, 0.85, learners=8),
    Case("tls_push_s4_vs_raw_tls", "push", ("tls-raw", "tls-raw-threads"), 4, 0.8, tls=True),
)


class Bench:
    """The far process, and where rows go."""

    def __init__(self, pipe: Connection, report: Report, keys: str, size: int, repeats: int):
        self._pipe = pipe
        self._report = report
        self._keys = keys
        self._size = size
        self._repeats = repeats

    def compare(self, case: Case) -> None:
        """Let the ways of a case take turns; its row, and that of memory."""
        keys = self._keys if case.tls else ""
        kinds = (*case.rivals, case.kind)
        setups = [Setup(kind, self._size, case.streams, case.learners, keys) for kind in kinds]
        pairs = [Pair(self._pipe, setup, NEAR[setup.kind]) for setup in setups]
        *rivals, mine = take_turns(pairs, self._repeats, WARM)
        facts = [pair.close()[1] for pair in pairs][-1]
        best = min(rivals, key=median)
        ratio = median([other / own for other, own in zip(best, mine, strict=True)])
        moved = self._size * case.learners / 1e9
        rates = " and ".join(
            f"{kind} {moved / median(taken):.2f}"
            for kind, taken in zip(case.rivals, rivals, strict=True)
        )
        wanted = f"at least {case.wanted:g}; " if case.wanted else ""
        note = f"{wanted}{moved / median(mine):.2f} GB/s, {rates}"
        self._report.add(case.metric, ratio, "ratio", note)
        self._memory(case, facts.get("peak", 0.0) / self._size)

    def rounds(self, directory: Path) -> None:
        """Whole rounds, beside the rate of the bare sockets measured just before."""
        setup = Setup("raw", self._size, 4)
        pair = Pair(self._pipe, setup, NEAR["raw"])
        (seconds,) = take_turns([pair], self._repeats, WARM)
        pair.close()
        rate = self._size / median(seconds)
        round_vs_floor(self._report, directory, self._size, self._repeats, rate)

    def _memory(self, case: Case, added: float) -> None:
        if case.metric == "push_s4_vs_raw":
            allowed = f"allowed: 1.15 + 64 MiB, here {1.15 + 64 * MIB / self._size:.2f}"
            self._report.add("receiver_peak_vs_message", added, "ratio", allowed)
        elif case.learners > 1:
            note = f"added by sending to {case.learners}, in encoded fragments; at most 1"
            self._report.add("fanout_sender_extra", added, "fragments", note)

    def control(self) -> None:
        """HEARTBEAT out, PULL back, against an echo of as many bytes."""
        kinds = ("echo", "control")
        pairs = [Pair(self._pipe, Setup(kind, CONTROL_BYTES, 0), NEAR[kind]) for kind in kinds]
        take_turns(pairs, self._repeats, 1)
        bare, own = (pair.close()[0]["p50"] for pair in pairs)
        note = f"at most 1.5; p50 {own * 1e6:.0f} us, echo {bare * 1e6:.0f} us"
        self._report.add("control_vs_raw_echo", own / bare, "x", note)


def main() -> None:
    """Parse the options, measure, report."""
    parser = benchmark_parser("How fast messages move, beside the same bytes on bare sockets.")
    parser.add_argument("--only", metavar="METRIC", help="only the rows that begin so")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=far_main, args=(far,), daemon=True)
    process.start()
    far.close()
    report = Report("wire")
    wanted = options.only or ""
    with tempfile.TemporaryDirectory(prefix="yeto-wire-") as folder:
        keys = Path(folder) / "keys"
        create_all(keys, 1, [SERVER_NAME], datetime.now(UTC))
        size, repeats = (64 * MIB, 5) if options.quick else (256 * MIB, 11)
        bench = Bench(near, report, str(keys), size, repeats)
        for case in CASES:
            if case.metric.startswith(wanted):
                bench.compare(case)
        if "control_vs_raw_echo".startswith(wanted):
            bench.control()
        if "round_vs_floor".startswith(wanted):
            bench.rounds(Path(folder))
        if "training_slowdown".startswith(wanted):
            slowdown(report, near, size)
    near.send(None)
    process.join()
    report.finish(options.json)


if __name__ == "__main__":
    main()
