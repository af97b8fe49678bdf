"""What must hold before a file's state is taken over: at start (K16), and per HELLO (K18)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.codec import (
    FileSource,
    Source,
    Structure,
    check_versions,
    read_header,
    read_structure,
    scan_fragment,
)
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import identity, open_shared
from checkpoint.format import BACKEND_NAMES, Header, ledger_mapping
from checkpoint.loading import LoadedFragment, load_all
from checkpoint.names import Names
from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from checkpoint.sums import SumsEntry, damaged_sections, entry_of, read_sums, recorded_step
from wire.errors import ErrorCode, ProtocolError
from wire.messages import Hello

_NO_DAMAGE = frozenset({Reason.LEGACY_V1, Reason.BACKEND_MISMATCH, Reason.STEP_AFTER_TOTAL})
"""Refusals of files that may be whole; a spare would not help against them."""


@dataclass(frozen=True, slots=True)
class ResumeFile:
    """A file that passed K16, in memory, waiting for the HELLO that fixes the session (K17).

    Attributes:
        structure: what the file holds beside the values.
        fragments: version, params and momentum per fragment.
        verified: whether `P.sums` vouched for every section; else "unverified" (K15).
        entry: the digests of the file as it was read.
        identity: device and inode of the file.
    """

    structure: Structure
    fragments: tuple[FragmentState, ...]
    verified: bool
    entry: SumsEntry
    identity: tuple[int, int]

    @property
    def revision(self) -> int:
        """2 or 3."""
        return self.structure.header.revision

    @property
    def global_step(self) -> int:
        """t of the cut."""
        return self.structure.header.global_step

    @property
    def ledger(self) -> dict[int, LedgerEntry]:
        """Totals per learner id."""
        return ledger_mapping(self.structure.ledger)

    @property
    def ledger_ids(self) -> frozenset[int]:
        """Every learner id that ever merged (C8)."""
        return frozenset(int(key) for key in self.structure.ledger["id"])

    @property
    def gate(self) -> Gate:
        """Its facts without its values, for HELLOs that come after those have gone."""
        return Gate(self.structure)

    def snapshot_for(self, hello: Hello) -> Snapshot:
        """The state, if `hello` is of the experiment that wrote it; all or nothing (K18).

        Cheap; copies no tensor.

        Raises:
            ProtocolError: `checkpoint-mismatch`; its sentence begins with the word of K19.
        """
        self.gate.check(hello)
        header = self.structure.header
        if header.backend is None:
            raise AssertionError("a V1 file does not get past K16")
        return Snapshot(
            header.backend,
            hello.fingerprint,
            hello.contract,
            header.global_step,
            self.fragments,
            self.ledger,
        )


@dataclass(frozen=True, slots=True)
class Gate:
    """What a checkpoint demands of every HELLO of the run that goes on from it (K18)."""

    structure: Structure

    def check(self, hello: Hello) -> None:
        """Raises ProtocolError `checkpoint-mismatch`; its sentence begins with the word of K19."""
        layout = hello.layout.fragments
        try:
            check_identity(
                self.structure,
                hello.fingerprint,
                [fragment.numel for fragment in layout],
                [len(fragment.numels) for fragment in layout],
            )
            _check_contract(self.structure, hello)
        except CheckpointRefused as error:
            raise ProtocolError(ErrorCode.CHECKPOINT_MISMATCH, str(error)) from error


def check_identity(
    structure: Structure, fingerprint: bytes, numels: Sequence[int], tensors: Sequence[int]
) -> None:
    """The part of K18 that a layout alone decides, in its order.

    Args:
        fingerprint: of the layout to compare with.
        numels: elements of each of its fragments.
        tensors: number of tensors of each of its fragments.

    Raises:
        CheckpointRefused: `fingerprint-mismatch`, `fragment-mismatch` or `legacy-grouped`.
    """
    header, trailer = structure.header, structure.trailer
    _same_fingerprint("header", header.fingerprint, fingerprint)
    if len(numels) != len(structure.fragments):
        raise CheckpointRefused(
            Reason.FRAGMENT_MISMATCH,
            f"the checkpoint has {len(structure.fragments)} fragments, the layout {len(numels)}",
        )
    for index, (head, numel) in enumerate(zip(structure.fragments, numels, strict=True)):
        if head.numel != numel:
            raise CheckpointRefused(
                Reason.FRAGMENT_MISMATCH,
                f"fragment {index} has {head.numel} elements in the checkpoint, "
                f"{numel} in the layout",
            )
    _same_fingerprint("trailer", trailer.fingerprint, fingerprint)
    if header.fingerprint is None and any(count != 1 for count in tensors):
        raise CheckpointRefused(
            Reason.LEGACY_GROUPED,
            f"a V{header.revision} checkpoint cannot prove which tensors its fragments held, "
            "and this layout has fragments of several tensors",
        )


def _same_fingerprint(where: str, stored: bytes | None, expected: bytes) -> None:
    if stored is not None and stored != expected:
        raise CheckpointRefused(
            Reason.FINGERPRINT_MISMATCH,
            f"layout fingerprint {stored.hex()[:16]} in the checkpoint's {where}, "
            f"{expected.hex()[:16]} in the layout",
        )


def _check_contract(structure: Structure, hello: Hello) -> None:
    stored = structure.trailer.contract
    if stored is None and hello.contract != hello.fingerprint:
        raise CheckpointRefused(
            Reason.CONTRACT_MISSING,
            "the checkpoint states no session contract, so only learners without a run id may "
            f"resume it; contract {hello.contract.hex()[:16]} is not "
            f"fingerprint {hello.fingerprint.hex()[:16]}",
        )
    if stored is not None and stored != hello.contract:
        raise CheckpointRefused(
            Reason.CONTRACT_MISMATCH,
            f"session contract {stored.hex()[:16]} in the checkpoint, "
            f"{hello.contract.hex()[:16]} in the HELLO",
        )


def load_resume_file(names: Names, backend: int, total_steps: int | None) -> ResumeFile:
    """Read P into memory and apply K16 in its order. Blocks; takes a shared lock on P (K14).

    Raises:
        CheckpointRefused: a word of K19. Where P is damaged and a whole older file lies beside
            it, the message says how to use that one (K9).
    """
    try:
        with open_shared(names.checkpoint) as fd:
            source = FileSource(fd)
            header = read_header(source)
            _check_backend(header, backend)
            structure = _resumable_structure(source, header, names)
            check_versions(structure)
            loaded = load_all(source, structure)
            entry = entry_of(source, structure, loaded)
            verified = check_integrity(names, entry)
            check_finite(loaded)
            _check_total(header, total_steps)
            states = tuple(item.state for item in loaded)
            return ResumeFile(structure, states, verified, entry, identity(os.fstat(fd)))
    except OSError as error:
        raise CheckpointRefused(Reason.UNREADABLE, f"{names.checkpoint}: {error}") from error
    except CheckpointRefused as error:
        advice = "" if error.word in _NO_DAMAGE else spare_advice(names)
        raise CheckpointRefused(
            error.word, f"{names.checkpoint}: {error.message}{advice}"
        ) from error


def _check_backend(header: Header, expected: int) -> None:
    if header.backend is None:
        raise CheckpointRefused(
            Reason.LEGACY_V1,
            "a V1 checkpoint does not say which iso backend wrote it and is never resumed; "
            "`yeto-checkpoint export` can still read it",
        )
    if header.backend != expected:
        raise CheckpointRefused(
            Reason.BACKEND_MISMATCH,
            f"written with --iso-backend {BACKEND_NAMES[header.backend]}, "
            f"started with {BACKEND_NAMES[expected]}",
        )


def _resumable_structure(source: Source, header: Header, names: Names) -> Structure:
    try:
        structure = read_structure(source, header)
    except CheckpointRefused as error:
        recorded = recorded_step(names.sums, header.global_step)
        if recorded is None or recorded.bytes == source.size:
            raise
        raise CheckpointRefused(
            error.word,
            f"{error.message} (integrity: {recorded.bytes} bytes were written for step "
            f"{header.global_step}, the file has {source.size})",
        ) from error
    check_trailer(structure)
    return structure


def check_trailer(structure: Structure) -> None:
    """Refuse the trailers of K4 that no syncer resumes, and one that contradicts the header."""
    trailer, fingerprint = structure.trailer, structure.header.fingerprint
    if not trailer.form.resumable:
        raise CheckpointRefused(
            Reason.TRAILER,
            f"the file ends with a {trailer.form}-byte sweep trailer; that mode is not part of "
            "this program, the file can only be inspected and exported",
        )
    if fingerprint and trailer.fingerprint and fingerprint != trailer.fingerprint:
        raise CheckpointRefused(
            Reason.TRAILER,
            f"layout fingerprint {trailer.fingerprint.hex()[:16]} in the trailer, "
            f"{fingerprint.hex()[:16]} in the header (fingerprint-mismatch inside the file)",
        )


def check_integrity(names: Names, actual: SumsEntry) -> bool:
    """Compare with `P.sums`; False where it has no entry for this step: "unverified" (K15).

    Raises:
        CheckpointRefused: `integrity`, naming every bad section and the way out.
    """
    recorded = recorded_step(names.sums, actual.global_step)
    if recorded is None:
        return False
    bad = list(damaged_sections(recorded, actual))
    if bad:
        raise CheckpointRefused(
            Reason.INTEGRITY,
            f"step {actual.global_step} does not match {names.sums}: {', '.join(bad)}; restore "
            f"the file, or delete {names.sums} if the checkpoint was replaced on purpose",
        )
    return True


def check_finite(loaded: Sequence[LoadedFragment]) -> None:
    """Refuse NaN and infinity (K6)."""
    for index, fragment in enumerate(loaded):
        if fragment.non_finite:
            raise CheckpointRefused(
                Reason.NON_FINITE, f"the {fragment.non_finite} of fragment {index} are not finite"
            )


def _check_total(header: Header, total_steps: int | None) -> None:
    if total_steps is not None and header.global_step > total_steps:
        raise CheckpointRefused(
            Reason.STEP_AFTER_TOTAL,
            f"the checkpoint is at step {header.global_step}, past --total-steps {total_steps}",
        )


def spare_advice(names: Names) -> str:
    """How to go on by hand from a whole file beside a damaged P; empty where there is none (K9)."""
    return "".join(_advice(names, path) for path in (names.spare, names.previous))


def _advice(names: Names, path: Path) -> str:
    step = whole_file_step(path, read_sums(names.sums))
    if step is None:
        return ""
    checkpoint = names.checkpoint
    return (
        f". {path} is a whole checkpoint of step {step} and was left alone; to go on from it by "
        f"hand: mv -- {checkpoint} {checkpoint}.damaged && mv -- {path} {checkpoint}, then start "
        "again with --resume"
    )


def whole_file_step(path: Path, sums: Sequence[SumsEntry]) -> int | None:
    """The step of a file that could be resumed, None where it is missing or damaged itself."""
    try:
        with open_shared(path) as fd:
            source = FileSource(fd)
            structure = read_structure(source, read_header(source))
            check_trailer(structure)
            check_versions(structure)
            scans = [scan_fragment(source, head) for head in structure.fragments]
            actual = entry_of(source, structure, scans)
    except (OSError, CheckpointRefused):
        return None
    if any(scan.params.non_finite or scan.momentum.non_finite for scan in scans):
        return None
    if any(entry.global_step == actual.global_step and entry != actual for entry in sums):
        return None
    return actual.global_step
