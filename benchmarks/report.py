"""What every benchmark program shares: options, a table, JSON rows, medians, peak memory."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure; `--json` writes a list of these."""

    metric: str
    value: float
    unit: str
    note: str = ""


class Report:
    """Collects rows, prints each as it is measured, and the whole table at the end."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []
        self._console = Console()

    def add(self, metric: str, value: float, unit: str, note: str = "") -> None:
        """Record one figure and show it at once."""
        row = Row(metric, value, unit, note)
        self.rows.append(row)
        self._console.print(f"{metric}: {_shown(value)} {unit}", highlight=False)

    def finish(self, json_path: Path | None) -> None:
        """Print the table; write the rows to `json_path` when it is given."""
        table = Table(title=self.title)
        table.add_column("metric", no_wrap=True)
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("note")
        for row in self.rows:
            table.add_row(row.metric, _shown(row.value), row.unit, row.note)
        self._console.print(table)
        if json_path is not None:
            json_path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1) + "\n")


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """A parser that knows `--json FILE` and `--quick`; a program may add its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under a minute")
    return parser


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return statistics.median(values)


def timed(work: Callable[[], object], repeats: int, warmups: int = 1) -> float:
    """Median seconds of `work` over `repeats` calls, after `warmups` that do not count."""
    for _ in range(warmups):
        work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def peak_rss(pid: int | str = "self") -> int:
    """Peak resident bytes of a process since its start or the last `reset_peak_rss` (Linux)."""
    return _status_bytes(pid, "VmHWM")


def current_rss(pid: int | str = "self") -> int:
    """Resident bytes of a process now (Linux)."""
    return _status_bytes(pid, "VmRSS")


def reset_peak_rss(pid: int | str = "self") -> None:
    """Make `peak_rss` start again from the current resident size (Linux)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_bytes(pid: int | str, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise LookupError(f"/proc/{pid}/status has no {field}")


def _shown(value: float) -> str:
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
