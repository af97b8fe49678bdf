"""A checkpoint as safetensors, under the names and shapes of a layout document (K25 to K28).

The file is streamed: one pass to hash and check, one to write, at most 1 MiB of values at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from checkpoint.codec import PIECE_BYTES, FileSource, FragmentHead, Structure, read_values
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import FileSystem, write_atomically
from checkpoint.inspection import (
    HALVES,
    Inspection,
    check_layout,
    check_marked,
    inspect_source,
    open_source,
)
from checkpoint.names import Names
from checkpoint.resume import check_identity
from wire.dtypes import DType
from wire.layout import NamedLayout
from wire.tensors import NonFiniteValues, encode

_DTYPE_NAMES = {DType.F32: "F32", DType.BF16: "BF16"}
_METADATA = "__metadata__"
_ALIGNMENT = 8
_MAX_HEADER = 100_000_000
"""What the safetensors readers accept."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How a file is exported.

    Attributes:
        dtype: F32, or BF16 rounded as W52.
        momentum: also write the momentum, under the prefix `momentum.`.
        legacy_fingerprint: layout fingerprint from an external audit, for V1 and V2 (K27).
        require_final: refuse a file without marker.
        force: replace an existing output.
    """

    dtype: DType = DType.F32
    momentum: bool = False
    legacy_fingerprint: bytes | None = None
    require_final: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where one output tensor's values lie: fragment, half (0 params), start, numel."""

    name: str
    shape: tuple[int, ...]
    head: FragmentHead
    half: int
    start: int
    numel: int


def export_file(path: Path, out: Path, layout: NamedLayout, options: ExportOptions) -> Inspection:
    """Write `out` from the checkpoint at `path`, atomically; the checkpoint is only read.

    Raises:
        CheckpointRefused: a word of K19, or `unmarked`, `layout`, `output`.
        OSError: the checkpoint could not be read.
    """
    _check_output(path, out, options.force)
    with open_source(path) as source:
        found = inspect_source(path, source)
        _check_exportable(found, layout, options)
        slices = list(_slices(found.structure, layout, options.momentum))
        header = _header(slices, options.dtype, _metadata(found, layout, source))
        temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
        try:
            write_atomically(FileSystem(), out, temporary, _stream(source, header, slices, options))
        except BaseException as error:
            with suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError):
                raise CheckpointRefused(Reason.OUTPUT, f"cannot write {out}: {error}") from error
            raise
    return found


def _check_output(path: Path, out: Path, force: bool) -> None:
    if not force and os.path.lexists(out):
        raise CheckpointRefused(Reason.OUTPUT, f"{out} exists; --force replaces it")
    if out.is_dir():
        raise CheckpointRefused(Reason.OUTPUT, f"{out} is a directory")
    if out.exists() and not out.is_file():
        # The finished file takes over the name: a device would be gone.
        raise CheckpointRefused(Reason.OUTPUT, f"{out} is no regular file")


def collides(path: Path, out: Path) -> bool:
    """Whether `out` names the checkpoint, another name of its file, or a name beside it."""
    if out.exists() and path.exists() and out.samefile(path):
        return True
    return out.resolve() in {name.resolve() for name in Names(path).all()}


def _check_exportable(found: Inspection, layout: NamedLayout, options: ExportOptions) -> None:
    for problem in found.problems():
        # Sweep files and files that no run could resume may still be exported (K4, K24).
        if problem.word in (Reason.INTEGRITY, Reason.NON_FINITE):
            raise problem
    structure = found.structure
    audited = options.legacy_fingerprint
    if audited is not None and audited != layout.fingerprint:
        raise CheckpointRefused(
            Reason.FINGERPRINT_MISMATCH,
            f"--legacy-fingerprint {audited.hex()[:16]}, the layout has "
            f"{layout.fingerprint.hex()[:16]}",
        )
    if structure.header.fingerprint is None and audited is not None:
        # The audit vouches for the grouping that the file cannot prove (K27).
        numels = [fragment.numel for fragment in layout.fragments]
        check_identity(structure, layout.fingerprint, numels, [1] * len(numels))
    else:
        try:
            check_layout(structure, layout)
        except CheckpointRefused as error:
            if error.word is not Reason.LEGACY_GROUPED:
                raise
            raise CheckpointRefused(
                error.word,
                f"{error.message}; give --legacy-fingerprint HEX if an audit outside this tool "
                "established which layout wrote the file",
            ) from error
    if options.require_final:
        check_marked(found)


def _slices(structure: Structure, layout: NamedLayout, momentum: bool) -> Iterator[_Slice]:
    """Output tensors in file order."""
    names: set[str] = {_METADATA}
    for head, fragment in zip(structure.fragments, layout.fragments, strict=True):
        for half in range(2 if momentum else 1):
            start = 0
            for tensor in fragment.tensors:
                name = f"{HALVES[half]}.{tensor.name}" if half else tensor.name
                if name in names:
                    raise CheckpointRefused(
                        Reason.LAYOUT, f"the output would hold two tensors named {name!r}"
                    )
                names.add(name)
                yield _Slice(name, tensor.shape, head, half, start, tensor.numel)
                start += tensor.numel


def _metadata(found: Inspection, layout: NamedLayout, source: FileSource) -> dict[str, str]:
    """What the output tells about its origin (K28); all strings."""
    structure = found.structure
    contract = structure.trailer.contract
    return {
        "yeto_revision": str(structure.header.revision),
        "yeto_iso_backend": found.backend,
        "yeto_layout_fingerprint": layout.fingerprint.hex(),
        "yeto_session_contract": contract.hex() if contract else "none",
        "yeto_global_step": str(structure.header.global_step),
        "yeto_checkpoint_sha256": _sha256(source),
        "yeto_marked_final": str(found.marked_final).lower(),
        "yeto_integrity": found.integrity,
    }


def _sha256(source: FileSource) -> str:
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(PIECE_BYTES))
    for at in range(0, source.size, PIECE_BYTES):
        piece = scratch[: min(PIECE_BYTES, source.size - at)]
        source.read_into(at, piece)
        digest.update(piece)
    return digest.hexdigest()


def _header(slices: list[_Slice], dtype: DType, metadata: dict[str, str]) -> bytes:
    """Length and JSON of a safetensors file, padded so that the data is aligned."""
    entries: dict[str, object] = {_METADATA: metadata}
    at = 0
    for item in slices:
        end = at + dtype.size(item.numel)
        entries[item.name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(item.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise CheckpointRefused(Reason.LAYOUT, "the names take more room than safetensors allows")
    return len(text).to_bytes(8, "little") + text


def _stream(
    source: FileSource, header: bytes, slices: list[_Slice], options: ExportOptions
) -> Iterator[bytes | memoryview]:
    yield header
    limit = PIECE_BYTES // 4
    scratch = np.empty(limit, "<f4")
    for item in slices:
        for start in range(0, item.numel, limit):
            piece = scratch[: min(limit, item.numel - start)]
            read_values(source, item.head, item.half, item.start + start, piece)
            try:
                yield encode(torch.from_numpy(piece), options.dtype)
            except NonFiniteValues as error:
                raise CheckpointRefused(
                    Reason.NON_FINITE,
                    f"tensor {item.name!r} has a value that {options.dtype.label} cannot hold",
                ) from error
