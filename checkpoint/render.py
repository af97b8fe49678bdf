"""Tables for people on a terminal; nothing else prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoint.codec import HalfScan
from checkpoint.format import ledger_mapping
from checkpoint.inspection import HALVES, Inspection

PIPE_WIDTH = 160
"""Columns where no terminal says how many there are."""


def _console() -> Console:
    """As wide as the terminal; in a pipe or a file, as wide as the tables need."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def render_inspection(found: Inspection) -> None:
    """Facts, fragments and ledger of one file."""
    console = _console()
    header, trailer = found.structure.header, found.structure.trailer
    sweep = "" if trailer.sweep is None else f", sweep {trailer.sweep}"
    integrity = found.integrity
    if found.bad_sections:
        integrity = f"mismatch: {', '.join(found.bad_sections)}"
    marker = "none" if found.marker is None else f"step {found.marker}"
    facts = {
        "file": found.names.checkpoint,
        "revision": f"V{header.revision}, {found.structure.size:,} bytes",
        "backend": found.backend,
        "step": header.global_step,
        "fragments": header.num_fragments,
        "trailer": f"{trailer.form.label} ({int(trailer.form)} bytes{sweep})",
        "fingerprint": found.fingerprint.hex() if found.fingerprint else "none",
        "contract": trailer.contract.hex() if trailer.contract else "none",
        "marker": f"{marker}{', marked final' if found.marked_final else ''}",
        "integrity": integrity,
    }
    if header.fingerprint is None:
        facts["note"] = f"V{header.revision} carries no proof of its layout"
    for name, value in facts.items():
        console.print(f"{name:<12} {value}", markup=False)
    console.print(_fragments(found))
    if len(found.structure.ledger):
        console.print(_ledger(found))
    for problem in found.problems():
        console.print(f"problem: {problem.word}: {problem.message}", markup=False)


def _fragments(found: Inspection) -> Table:
    table = Table(title="fragments")
    for name in ("fragment", "version", "numel", "params norm", "momentum norm"):
        table.add_column(name, justify="right")
    for index, (head, scan) in enumerate(zip(found.structure.fragments, found.scans, strict=True)):
        cells = (index, head.version, f"{head.numel:,}")
        table.add_row(*map(str, cells), _measure(scan.params), _measure(scan.momentum))
    return table


def _ledger(found: Inspection) -> Table:
    table = Table(title="ledger")
    for name in ("learner", "merges", "steps", "tokens"):
        table.add_column(name, justify="right")
    for key, entry in sorted(ledger_mapping(found.structure.ledger).items()):
        table.add_row(str(key), *(f"{value:,}" for value in entry))
    return table


def _measure(half: HalfScan) -> str:
    return f"{half.non_finite} not finite" if half.non_finite else f"{half.norm:.6g}"


def render_verification(path: Path, status: str, step: int) -> None:
    """One line of `verify`."""
    why = "" if status == "verified" else ": it is readable, no digests were there to compare"
    _console().print(f"{path}: step {step} {status}{why}", markup=False)


def render_comparison(result: dict[str, Any]) -> None:
    """Facts that differ, and the fragments that differ with their distances."""
    console = _console()
    if result["equal"]:
        console.print("the checkpoints are equal")
        return
    for name, (first, second) in result["facts"].items():
        console.print(f"{name}: {first} -> {second}", markup=False)
    changed = [fragment for fragment in result["fragments"] if fragment["differs"]]
    if not changed:
        return
    table = Table(title=f"{len(changed)} of {len(result['fragments'])} fragments differ")
    columns = [f"{half} {what}" for half in HALVES for what in ("max", "L2", "relative")]
    for name in ("fragment", "version", "numel", *columns):
        table.add_column(name, justify="right")
    for fragment in changed:
        measures = [cell for half in HALVES for cell in _distance(fragment.get(half))]
        sizes = (_pair(fragment["versions"]), _pair(fragment["numels"]))
        table.add_row(str(fragment["index"]), *sizes, *measures)
    console.print(table)


def _pair(values: list[int]) -> str:
    return str(values[0]) if values[0] == values[1] else f"{values[0]} -> {values[1]}"


def _distance(half: dict[str, Any] | None) -> tuple[str, str, str]:
    """Largest and L2 distance, and the latter relative to the first file; "-" where unknown."""
    if half is None:
        return "-", "-", "-"
    relative = "-" if half["relative"] is None else f"{half['relative']:.3g}"
    return f"{half['max_abs']:.3g}", f"{half['l2']:.3g}", relative
