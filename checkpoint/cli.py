"""`yeto-checkpoint`: inspect, verify, diff and export files of any revision (K24 to K28).

Exit codes: 0 done or verified, 1 refused or unreadable, 2 usage error, 3 readable but unverified.
A refusal prints `refused:<word>` and a sentence on stderr. No command writes to the checkpoint.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from checkpoint.comparison import compare_files
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.export import ExportOptions, collides, export_file
from checkpoint.inspection import inspect_file, verify_file
from checkpoint.names import Names
from checkpoint.render import render_comparison, render_inspection, render_verification
from checkpoint.resume import spare_advice
from wire.cli_support import Group, version_option
from wire.dtypes import DType
from wire.layout import NamedLayout, StatedFingerprintError

Result = TypeVar("Result")

EXIT_REFUSED = 1
EXIT_UNVERIFIED = 3

_FILE = click.Path(path_type=Path)
_HEX_HASH = re.compile(r"[0-9a-fA-F]{64}")

_layout_option = click.option(
    "--layout",
    "layout_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="layout.json of a learner of the run.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
_final_option = click.option(
    "--require-final", is_flag=True, help="Refuse a checkpoint that is not marked final."
)


@click.group(cls=Group)
@version_option()
def main() -> None:
    """Look at yeto checkpoints, check them, compare them, export them."""


@main.command()
@click.argument("file", type=_FILE)
@_json_option
def inspect(file: Path, as_json: bool) -> None:
    """Show what FILE holds: step, fragments, norms, ledger, identity, marker, integrity."""
    found = _or_refuse(lambda: inspect_file(file), file, as_json)
    if as_json:
        _print_json(found.to_json())
    else:
        render_inspection(found)


@main.command()
@click.argument("file", type=_FILE)
@_layout_option
@_final_option
@_json_option
def verify(file: Path, layout_path: Path | None, require_final: bool, as_json: bool) -> None:
    """Check FILE as a resume would, and against FILE.sums: 0 verified, 3 unverified, 1 refused."""

    def work() -> tuple[str, int]:
        layout = None if layout_path is None else _read_layout(layout_path)
        try:
            found = verify_file(file, layout, require_final)
        except CheckpointRefused as error:
            if error.word in (Reason.UNREADABLE, Reason.UNMARKED):
                raise
            advice = spare_advice(Names(file))
            raise CheckpointRefused(error.word, f"{error.message}{advice}") from error
        return found.integrity, found.structure.header.global_step

    status, step = _or_refuse(work, file, as_json)
    if as_json:
        _print_json({"file": str(file), "status": status, "global_step": step, "reason": None})
    else:
        render_verification(file, status, step)
    sys.exit(0 if status == "verified" else EXIT_UNVERIFIED)


@main.command()
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@_json_option
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Tell which fragments of checkpoints A and B differ, and by how much; exits 0 either way."""
    result = _or_refuse(lambda: compare_files(a, b), None, as_json)
    if as_json:
        _print_json(result)
    else:
        render_comparison(result)


@main.command()
@click.argument("file", type=_FILE)
@click.argument("out", type=_FILE)
@_layout_option
@click.option(
    "--dtype",
    type=click.Choice(["f32", "bf16"]),
    default="f32",
    show_default=True,
    help="Element type of the output; bf16 rounds to nearest even.",
)
@click.option("--momentum", is_flag=True, help="Also write the momentum, as momentum.NAME.")
@click.option(
    "--legacy-fingerprint",
    metavar="HEX",
    help="Layout fingerprint from an external audit, for grouped V1 and V2 files.",
)
@_final_option
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
def export(
    file: Path,
    out: Path,
    *,
    layout_path: Path | None,
    dtype: str,
    momentum: bool,
    legacy_fingerprint: str | None,
    require_final: bool,
    force: bool,
) -> None:
    """Write the tensors of FILE to OUT as safetensors, named and shaped by --layout."""
    if layout_path is None:
        raise click.UsageError("export needs --layout FILE, the layout.json of a learner")
    if legacy_fingerprint is not None and not _HEX_HASH.fullmatch(legacy_fingerprint):
        raise click.BadParameter(
            f"{legacy_fingerprint[:80]!r}: must be 64 hexadecimal digits",
            param_hint="--legacy-fingerprint",
        )
    if collides(file, out) or (out.exists() and out.samefile(layout_path)):
        raise click.UsageError(f"OUT {out} is an input or belongs to the checkpoint")
    options = ExportOptions(
        dtype=DType[dtype.upper()],
        momentum=momentum,
        legacy_fingerprint=None
        if legacy_fingerprint is None
        else bytes.fromhex(legacy_fingerprint),
        require_final=require_final,
        force=force,
    )
    found = _or_refuse(
        lambda: export_file(file, out, _read_layout(layout_path), options), file, as_json=False
    )
    revision = found.structure.header.revision
    if found.structure.header.fingerprint is None:
        click.echo(
            f"note: a V{revision} file carries no proof of its layout; names and shapes are "
            f"those of {layout_path}",
            err=True,
        )
    click.echo(f"{out}: step {found.structure.header.global_step}, {dtype}, {found.integrity}")


def _read_layout(path: Path) -> NamedLayout:
    try:
        return NamedLayout.from_json(path.read_text("utf-8"))
    except StatedFingerprintError as error:
        raise CheckpointRefused(Reason.FINGERPRINT_MISMATCH, f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise CheckpointRefused(Reason.LAYOUT, f"{path}: {error}") from error


def _or_refuse(work: Callable[[], Result], file: Path | None, as_json: bool) -> Result:
    """The result of `work`; a refusal or a failing disk is told, and ends with exit code 1."""
    try:
        return work()
    except CheckpointRefused as error:
        _refuse(str(error.word), error.message, file, as_json)
    except OSError as error:
        _refuse(str(Reason.UNREADABLE), str(error), file, as_json)


def _refuse(word: str, message: str, file: Path | None, as_json: bool) -> NoReturn:
    if as_json:
        shown = None if file is None else str(file)
        _print_json({"file": shown, "status": "refused", "reason": word, "message": message})
    click.echo(f"refused:{word} {message}", err=True)
    sys.exit(EXIT_REFUSED)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, allow_nan=False))
