"""Rounds per second, latencies, loop lag, and what bad or slow learners cost the others.

`python -m benchmarks.rounds [--quick] [--json FILE]`. Everything runs over loopback: one syncer
process, and this process as all the learners (see `benchmarks.swarm`).
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import MIB, Report, benchmark_parser, current_rss, median
from benchmarks.swarm import LightLearner, Swarm, SyncerProcess, layout_of, swarm_of
from wire.dtypes import DType
from wire.layout import NamedLayout

TINY = layout_of(fragments=4, numel=64)
WIDE = layout_of(fragments=4, numel=64 * 1024)
"""256 KiB fragments in f32: enough for a slow reader to fall behind."""
SLOW_BYTES_PER_S = 100_000
IDLE_STRANGERS = 500
GARBAGE_STRANGERS = 200
READY_ROUNDS = 20
WAIT = 120.0


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def settle(swarm: Swarm) -> None:
    """Past the first rounds, in which code is loaded."""
    goal = swarm.version + READY_ROUNDS
    swarm.run(WAIT, until=lambda: swarm.version >= goal)
    if swarm.version < goal:
        raise RuntimeError("the rounds do not go on")
    swarm.take_latencies()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rounds(report: Report, directory: Path, learners: int, seconds: float) -> None:
    """A tiny model, quorum of all: what the machinery itself costs."""
    with SyncerProcess(directory, "--quorum", str(learners)) as process:
        swarm = swarm_of(process, learners, TINY)
        settle(swarm)
        before = cpu_seconds(process.pid)
        rate = swarm.rate(seconds)
        busy = (cpu_seconds(process.pid) - before) / seconds
        waits = swarm.take_latencies()
        swarm.close()
    note = (
        f"PULL to BCAST p50 {percentile(waits, 0.5) * 1e3:.1f} ms, p99 "
        f"{percentile(waits, 0.99) * 1e3:.1f} ms; syncer uses {busy:.2f} cores"
    )
    report.add(f"rounds_per_s_{learners}", rate, "1/s", note)


def loop_lag(report: Report, directory: Path, numel: int) -> None:
    """Lateness of timers in the syncer's loop while one large fragment merges."""
    samples = directory / "lag.txt"
    module = (sys.executable, "-m", "benchmarks.lag_probe", str(samples))
    with SyncerProcess(directory, "--quorum", "2", "--pipeline", "1", module=module) as process:
        layout = layout_of(fragments=1, numel=numel)
        learners = [LightLearner(process.port, number, layout, DType.BF16) for number in range(2)]
        swarm = Swarm(learners)
        learners[0].send_init()
        swarm.run(WAIT, until=lambda: swarm.version >= 3)
        if swarm.version < 3:
            raise RuntimeError("the large fragment was not merged in time")
        swarm.close()
    lags = [float(line) for line in samples.read_text().split()]
    report.add(
        "loop_lag_p99_ms",
        percentile(lags, 0.99) * 1e3,
        "ms",
        f"{4 * numel / MIB:.0f} MiB fragment, {len(lags)} looks, max {max(lags) * 1e3:.0f} ms",
    )


class SlowReader(threading.Thread):
    """A learner that takes `SLOW_BYTES_PER_S` and answers what it finds in them."""

    def __init__(self, port: int, learner_id: int, layout: NamedLayout) -> None:
        super().__init__(daemon=True)
        self.learner = LightLearner(port, learner_id, layout)
        self._stop_asked = threading.Event()

    def run(self) -> None:
        piece = SLOW_BYTES_PER_S // 20
        while not self._stop_asked.wait(0.05):
            if not self.learner.read(piece):
                return

    def finish(self) -> None:
        self._stop_asked.set()
        self.join()
        self.learner.close()


def slow_reader(report: Report, directory: Path, seconds: float, pairs: int) -> None:
    """Two learners at quorum 2, with and without a third that reads slowly, in turns."""
    ratios = []
    with SyncerProcess(directory, "--quorum", "2", "--grace-ms", "0") as process:
        swarm = swarm_of(process, 2, WIDE)
        settle(swarm)
        for _ in range(pairs):
            alone = swarm.rate(seconds)
            slow = SlowReader(process.port, 2, WIDE)
            slow.start()
            settle(swarm)
            ratios.append(swarm.rate(seconds) / alone)
            slow.finish()
            settle(swarm)
        swarm.close()
    report.add(
        "slow_reader_ratio",
        median(ratios),
        "x",
        f"round rate of two learners beside one that reads {SLOW_BYTES_PER_S // 1000} KB/s",
    )


def strangers(report: Report, directory: Path, seconds: float) -> None:
    """Round latency with 500 silent sockets and 200 that send garbage, against none."""
    with SyncerProcess(directory, "--quorum", "4", "--handshake-timeout-s", "60") as process:
        swarm = swarm_of(process, 4, TINY)
        settle(swarm)
        swarm.run(seconds)
        alone = median(swarm.take_latencies())
        idle = [
            socket.create_connection(("127.0.0.1", process.port)) for _ in range(IDLE_STRANGERS)
        ]
        garbage = []
        for _ in range(GARBAGE_STRANGERS):
            sock = socket.create_connection(("127.0.0.1", process.port))
            sock.sendall(os.urandom(512))
            garbage.append(sock)
        swarm.run(seconds)
        crowded = median(swarm.take_latencies())
        for sock in (*idle, *garbage):
            sock.close()
        swarm.close()
    report.add(
        "idle_strangers_latency_ratio",
        crowded / alone,
        "x",
        f"median PULL to BCAST {crowded * 1e3:.1f} ms against {alone * 1e3:.1f} ms",
    )


def dead_member(report: Report, directory: Path, repeats: int) -> None:
    """Quorum 3 of 3: from the end of one connection in mid-round to the next commit."""
    waits = []
    with SyncerProcess(directory, "--quorum", "3") as process:
        survivors = swarm_of(process, 2, TINY)
        for _ in range(repeats):
            victim = LightLearner(process.port, 2, TINY)
            everyone = Swarm([*survivors.learners, victim])
            goal = everyone.version + READY_ROUNDS
            everyone.run(WAIT, until=lambda: everyone.version >= goal)  # noqa: B023
            survivors.run(0.2)  # the victim does not answer any more: the round waits for it
            before = survivors.version
            start = time.perf_counter()
            victim.close()
            survivors.run(WAIT, until=lambda: survivors.version > before)  # noqa: B023
            waits.append(time.perf_counter() - start)
        survivors.close()
    report.add("dead_member_s", max(waits), "s", f"longest of {repeats}, quorum 3 of 3")


def memory_growth(report: Report, directory: Path, count: int) -> None:
    """Resident size before and after many rounds, a slow reader among the learners."""
    with SyncerProcess(directory, "--quorum", "2", "--grace-ms", "0") as process:
        swarm = swarm_of(process, 2, WIDE)
        slow = SlowReader(process.port, 2, WIDE)
        slow.start()
        for _ in range(10):
            settle(swarm)
        before = current_rss(process.pid)
        goal = swarm.version + count
        swarm.run(WAIT * 5, until=lambda: swarm.version >= goal)
        growth = (current_rss(process.pid) - before) / MIB
        slow.finish()
        swarm.close()
    report.add(
        "rss_growth_mib_1000_rounds",
        growth * 1000 / count,
        "MiB",
        f"over {count} rounds of 256 KiB fragments, one of three learners reads slowly",
    )


def main() -> None:
    """Measure everything."""
    options = benchmark_parser(__doc__ or "").parse_args()
    quick: bool = options.quick
    report = Report("Rounds over loopback")
    measures: list[Callable[[Report, Path], None]] = [
        *(
            partial(rounds, learners=learners, seconds=2 if quick else 10)
            for learners in (1, 4, 16, 64)
        ),
        partial(loop_lag, numel=(64 if quick else 256) * MIB),
        partial(slow_reader, seconds=1.5 if quick else 6, pairs=1 if quick else 5),
        partial(strangers, seconds=1.5 if quick else 6),
        partial(dead_member, repeats=2 if quick else 5),
        partial(memory_growth, count=300 if quick else 1000),
    ]
    with tempfile.TemporaryDirectory() as name:
        for number, measure in enumerate(measures):
            directory = Path(name, str(number))
            directory.mkdir()
            measure(report, directory)
    report.finish(options.json)


if __name__ == "__main__":
    main()
