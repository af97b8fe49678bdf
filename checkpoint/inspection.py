"""What the tools find out about a file in one streaming pass (K24): `inspect` and `verify`.

Memory stays at one piece of 1 MiB, whatever the size of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.codec import (
    FileSource,
    FragmentScan,
    HalfScan,
    Structure,
    check_versions,
    read_header,
    read_structure,
    scan_fragment,
)
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import open_shared
from checkpoint.format import BACKEND_NAMES, ledger_mapping
from checkpoint.marker import read_marker
from checkpoint.names import Names
from checkpoint.resume import check_identity, check_integrity, check_trailer
from checkpoint.sums import SumsEntry, damaged_sections, entry_of, recorded_step
from wire.layout import NamedLayout

HALVES = ("params", "momentum")


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything about a readable file, good or not.

    Attributes:
        names: the path and its adjacent names.
        scans: digest, norms and non-finite counts per fragment.
        entry: digests of all sections as read.
        recorded: what `P.sums` says about this step, None where it says nothing.
        marker: the step that the marker states, None where it is missing or malformed.
    """

    names: Names
    structure: Structure
    scans: tuple[FragmentScan, ...]
    entry: SumsEntry
    recorded: SumsEntry | None
    marker: int | None

    @property
    def backend(self) -> str:
        """scalar, torch-svd, or unknown for V1 (K27)."""
        backend = self.structure.header.backend
        return "unknown" if backend is None else BACKEND_NAMES[backend]

    @property
    def fingerprint(self) -> bytes | None:
        """Of the header, else of the trailer."""
        return self.structure.header.fingerprint or self.structure.trailer.fingerprint

    @property
    def marked_final(self) -> bool:
        """Whether the marker names exactly this file's step (K21)."""
        return self.marker == self.structure.header.global_step

    @property
    def bad_sections(self) -> list[str]:
        """Sections that differ from `P.sums`."""
        return [] if self.recorded is None else list(damaged_sections(self.recorded, self.entry))

    @property
    def integrity(self) -> str:
        """verified, unverified or mismatch (K15)."""
        if self.recorded is None:
            return "unverified"
        return "mismatch" if self.bad_sections else "verified"

    def problems(self) -> Iterator[CheckpointRefused]:
        """Why `verify` would refuse the file, in the order of K16."""
        for check in (self._check_trailer, self._check_versions, self._check_sums):
            try:
                check()
            except CheckpointRefused as error:
                yield error
        for index, scan in enumerate(self.scans):
            for half, found in zip(HALVES, (scan.params, scan.momentum), strict=True):
                if found.non_finite:
                    yield CheckpointRefused(
                        Reason.NON_FINITE,
                        f"{found.non_finite} values of the {half} of fragment {index} are NaN "
                        "or infinite",
                    )

    def _check_trailer(self) -> None:
        check_trailer(self.structure)

    def _check_versions(self) -> None:
        check_versions(self.structure)

    def _check_sums(self) -> None:
        check_integrity(self.names, self.entry)

    def to_json(self) -> dict[str, Any]:
        """The object that `inspect --json` prints; a norm is null where values are not finite."""
        header, trailer = self.structure.header, self.structure.trailer
        return {
            "file": str(self.names.checkpoint),
            "bytes": self.structure.size,
            "revision": header.revision,
            "backend": self.backend,
            "global_step": header.global_step,
            "num_fragments": header.num_fragments,
            "fragments": [self._fragment_json(index) for index in range(len(self.scans))],
            "ledger": [
                {"id": key, **entry._asdict()}
                for key, entry in sorted(ledger_mapping(self.structure.ledger).items())
            ],
            "trailer": trailer.form.label,
            "trailer_bytes": int(trailer.form),
            "sweep": trailer.sweep,
            "fingerprint": _hex(self.fingerprint),
            "contract": _hex(trailer.contract),
            "marker_step": self.marker,
            "marked_final": self.marked_final,
            "integrity": self.integrity,
            "bad_sections": self.bad_sections,
            "problems": [
                {"reason": str(error.word), "message": error.message} for error in self.problems()
            ],
        }

    def _fragment_json(self, index: int) -> dict[str, Any]:
        head, scan = self.structure.fragments[index], self.scans[index]
        return {
            "index": index,
            "version": head.version,
            "numel": head.numel,
            "params_norm": _norm(scan.params),
            "momentum_norm": _norm(scan.momentum),
            "params_non_finite": scan.params.non_finite,
            "momentum_non_finite": scan.momentum.non_finite,
            "digest": scan.digest,
        }


@contextmanager
def open_source(path: Path) -> Iterator[FileSource]:
    """A checkpoint under a shared lock (K14); `unreadable` where the system cannot open it."""
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(open_shared(path))
        except OSError as error:
            raise CheckpointRefused(
                Reason.UNREADABLE, f"{path}: {error.strerror or error}"
            ) from error
        yield FileSource(fd)


def inspect_source(path: Path, source: FileSource) -> Inspection:
    """Read a whole file of any revision once; raises CheckpointRefused only for its structure."""
    names = Names(path)
    structure = read_structure(source, read_header(source))
    scans = tuple(scan_fragment(source, head) for head in structure.fragments)
    return Inspection(
        names=names,
        structure=structure,
        scans=scans,
        entry=entry_of(source, structure, scans),
        recorded=recorded_step(names.sums, structure.header.global_step),
        marker=read_marker(names.marker),
    )


def inspect_file(path: Path) -> Inspection:
    """`inspect_source` of the file at `path`."""
    with open_source(path) as source:
        return inspect_source(path, source)


def verify_file(path: Path, layout: NamedLayout | None, require_final: bool) -> Inspection:
    """Apply K4 to K6 and K15, K18 against `layout`, and the marker when it is required.

    Returns:
        The inspection; its `integrity` is verified or unverified.

    Raises:
        CheckpointRefused: the first thing that is wrong.
    """
    found = inspect_file(path)
    for problem in found.problems():
        raise problem
    if layout is not None:
        check_layout(found.structure, layout)
    if require_final:
        check_marked(found)
    return found


def check_layout(structure: Structure, layout: NamedLayout) -> None:
    """K18 as far as a layout decides it."""
    check_identity(
        structure,
        layout.fingerprint,
        [fragment.numel for fragment in layout.fragments],
        [len(fragment.tensors) for fragment in layout.fragments],
    )


def check_marked(found: Inspection) -> None:
    """Refuse a file that no marker declares final (K21)."""
    if not found.marked_final:
        stated = "missing or malformed" if found.marker is None else f"of step {found.marker}"
        raise CheckpointRefused(
            Reason.UNMARKED,
            f"the checkpoint of step {found.structure.header.global_step} is not marked final: "
            f"{found.names.marker} is {stated}",
        )


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _norm(half: HalfScan) -> float | None:
    return None if half.non_finite else half.norm
