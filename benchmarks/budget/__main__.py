"""The two-process cutoff and consolidation of budget runs, proved and compared.

For every arm and seed: learners train exactly N steps through a cutoff syncer, report, and freeze;
a second syncer on the same endpoint merges every fragment once more with all of them; tape,
checkpoints and payloads are checked; the exported model is compared with a synchronous baseline of
the same data and tokens. Leaves results.jsonl, summary.json, report.md and report.png. Exits with 1
when any check of any run fails, with 2 when it cannot start.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from benchmarks.budget.baseline import data_sha256
from benchmarks.budget.picture import draw
from benchmarks.budget.plan import ARMS, QUICK, Arm, Sizes, choose_arms, identity, plan
from benchmarks.budget.results import Record, Results, ResultsRefused
from benchmarks.budget.runner import Runner
from benchmarks.budget.summary import report_text, rows, summarise, summary_document
from benchmarks.report import Report, benchmark_parser
from checkpoint.files import FileSystem, write_atomically
from learner.tasks.base import TaskError

OUTPUT = Path("budget-run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    torch.set_num_threads(1)
    try:
        if options.quick and options.output is None:
            with tempfile.TemporaryDirectory() as folder:
                return _run(options, Path(folder), console)
        return _run(options, options.output or OUTPUT, console)
    except (ResultsRefused, TaskError, OSError) as error:
        console.print(f"[bold red]budget:[/] {error}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; --resume goes on after the last finished run")
        return 130


def _run(options: argparse.Namespace, folder: Path, console: Console) -> int:
    sizes = _sizes(options)
    arms: list[Arm] = options.arms or (choose_arms(["m2"]) if options.quick else [*ARMS.values()])
    seeds: list[int] = options.seeds or ([0] if options.quick else [0, 1, 2])
    cases = plan(arms, seeds)
    folder.mkdir(parents=True, exist_ok=True)
    mark = identity(sizes, data_sha256(options.data))
    results = Results(folder / "results.jsonl", mark, resume=options.resume)
    keys = [case.key for case in cases]
    try:
        runner = Runner(folder, sizes, options.data, mark, lambda text: console.print(f"  {text}"))
        for number, case in enumerate(cases, 1):
            if results.finished(case.key):
                console.print(f"[{number}/{len(cases)}] {case.key}: finished before", markup=False)
                continue
            console.print(f"[{number}/{len(cases)}] {case.key}", markup=False)
            record = runner.run(case)
            results.add(record)
            for text in record.violations:
                console.print(f"  failed: {text}", markup=False, soft_wrap=True)
    finally:
        records = results.of(keys)
        missing = [key for key in keys if key not in {record.key for record in records}]
        results.close()
        _write_report(folder, records, missing, sizes, mark)
    report = Report("Equal budgets")
    for row in rows(records):
        report.add(*row)
    report.finish(options.json)
    return 0 if not missing and all(record.passed for record in records) else 1


def _write_report(
    folder: Path, records: list[Record], missing: list[str], sizes: Sizes, mark: str
) -> None:
    document = summary_document(records, missing, sizes, mark)
    _replace(folder / "summary.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    _replace(folder / "report.md", report_text(records, missing, sizes))
    draw(summarise(records), folder / "report.png")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    write_atomically(FileSystem(), path, temporary, [text.encode()])


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"default: {OUTPUT}")
    parser.add_argument("--resume", action="store_true", help="leave out runs that passed before")
    parser.add_argument(
        "--arms", type=_arms, metavar="NAMES", help=f"comma separated, of: {', '.join(ARMS)}"
    )
    parser.add_argument("--seeds", type=_seeds, metavar="NUMBERS", help="default: 0,1,2")
    parser.add_argument("--data", type=Path, help="text to train on, default: built-in")
    for item in fields(Sizes):
        kind = _positive_int if isinstance(item.default, int) else _not_negative
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kind, metavar="N")
    return parser


def _sizes(options: argparse.Namespace) -> Sizes:
    chosen = QUICK if options.quick else Sizes()
    given = {
        item.name: value
        for item in fields(Sizes)
        if (value := getattr(options, item.name)) is not None
    }
    return Sizes(**{**{item.name: getattr(chosen, item.name) for item in fields(Sizes)}, **given})


def _arms(text: str) -> list[Arm]:
    try:
        return choose_arms(text.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"no arm named {error}") from error


def _seeds(text: str) -> list[int]:
    return [_whole(word, 0) for word in text.split(",")]


def _positive_int(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the benchmark as Ctrl-C does: no program of it is left running."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
