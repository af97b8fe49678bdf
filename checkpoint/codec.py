"""Reading checkpoints of any revision, and the sections of a V3 file to write (K1 to K6).

Reading has two parts. `read_structure` walks heads and tail and checks every size against the bytes
that are there, so nothing is allocated on the word of a damaged file. `scan_fragment` then reads
values in constant memory, hashing what passes; `checkpoint.loading` reads them into tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoint.blake2b import blake2b_128
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.format import (
    FRAGMENT_HEAD,
    LARGEST_HEADER,
    LEDGER_COUNT,
    LEDGER_DTYPE,
    Header,
    Trailer,
    TrailerForm,
    check_ledger,
    parse_header,
    parse_trailer,
    version_at,
)
from checkpoint.snapshot import FragmentState
from wire.dtypes import DType
from wire.tensors import representable

READ_LIMIT = 8 << 20
"""Bytes of the largest single read (K6)."""
PIECE_BYTES = 1 << 20
"""Bytes of values read, hashed and checked at a time, while they are in the processor's cache."""


class Source(Protocol):
    """Something with a known size that can be read at any offset."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`; raises CheckpointRefused `truncated` when the file ends before that."""


class FileSource:
    """A file behind a descriptor, whose size is fixed when this is made. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset`, in reads of at most 8 MiB (K6)."""
        while out:
            count = os.preadv(self._fd, [out[:READ_LIMIT]], offset)
            if count == 0:
                raise CheckpointRefused(Reason.TRUNCATED, f"the file ends at byte {offset}")
            offset += count
            out = out[count:]


class FragmentHead(NamedTuple):
    """One fragment's version, elements, and byte offset of its section."""

    version: int
    numel: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the section (K1)."""
        return FRAGMENT_HEAD.size + 8 * self.numel


@dataclass(frozen=True, slots=True)
class Structure:
    """Everything in a file except the values.

    Attributes:
        ledger: structured array of id, merges, steps, tokens.
        tail_offset: byte offset of the tail section, which ends with the file.
        size: bytes of the file.
    """

    header: Header
    fragments: tuple[FragmentHead, ...]
    ledger: NDArray[np.void]
    trailer: Trailer
    tail_offset: int
    size: int


def read_header(source: Source) -> Header:
    """The header of any revision; raises CheckpointRefused."""
    return parse_header(_read(source, 0, min(source.size, LARGEST_HEADER)))


def read_structure(source: Source, header: Header) -> Structure:
    """Fragment heads, ledger and trailer, up to the exact end of the file (K4, K6).

    Raises:
        CheckpointRefused: `truncated`, `ledger` or `trailer`.
    """
    at = header.size
    if header.num_fragments * FRAGMENT_HEAD.size > source.size - at:
        raise CheckpointRefused(
            Reason.TRUNCATED,
            f"{header.num_fragments} fragments do not fit in {source.size} bytes",
        )
    fragments = []
    for index in range(header.num_fragments):
        head = _read_head(source, at, index)
        fragments.append(head)
        at += head.size
    ledger, end = _read_ledger(source, at)
    # A longer rest is no known form; reading one byte more than the longest is enough to say so.
    if source.size - end > max(TrailerForm):
        raise CheckpointRefused(
            Reason.TRAILER, f"{source.size - end} bytes follow the ledger, at most 72 are known"
        )
    trailer = parse_trailer(_read(source, end, source.size - end))
    return Structure(header, tuple(fragments), ledger, trailer, at, source.size)


def _read_head(source: Source, at: int, index: int) -> FragmentHead:
    left = source.size - at
    if left < FRAGMENT_HEAD.size:
        raise CheckpointRefused(
            Reason.TRUNCATED, f"the file ends in the head of fragment {index}, at {source.size}"
        )
    version, numel = FRAGMENT_HEAD.unpack(_read(source, at, FRAGMENT_HEAD.size))
    head = FragmentHead(version, numel, at)
    if head.size > left:
        raise CheckpointRefused(
            Reason.TRUNCATED,
            f"fragment {index} states {numel} elements, {head.size} bytes; {left} bytes are left",
        )
    return head


def _read_ledger(source: Source, at: int) -> tuple[NDArray[np.void], int]:
    if source.size - at < LEDGER_COUNT.size:
        raise CheckpointRefused(Reason.TRUNCATED, "the file ends before the ledger")
    (count,) = LEDGER_COUNT.unpack(_read(source, at, LEDGER_COUNT.size))
    at += LEDGER_COUNT.size
    if count * LEDGER_DTYPE.itemsize > source.size - at:
        raise CheckpointRefused(
            Reason.TRUNCATED,
            f"{count} ledger entries do not fit in the {source.size - at} bytes that are left",
        )
    ledger = np.empty(count, LEDGER_DTYPE)
    source.read_into(at, ledger.view(np.uint8).data)
    check_ledger(ledger)
    return ledger, at + ledger.nbytes


def check_versions(structure: Structure) -> None:
    """Refuse versions that are not the contiguous cut at the file's step (K5)."""
    header = structure.header
    for index, head in enumerate(structure.fragments):
        expected = version_at(header.global_step, index, header.num_fragments)
        if head.version != expected:
            raise CheckpointRefused(
                Reason.VERSIONS,
                f"fragment {index} has version {head.version}; step {header.global_step} of "
                f"{header.num_fragments} fragments needs {expected}",
            )


class HalfScan(NamedTuple):
    """Params or momentum: how many values are not finite, and the f64 L2 norm of the others."""

    non_finite: int
    norm: float


class FragmentScan(NamedTuple):
    """What one pass over a fragment's section tells."""

    digest: str
    params: HalfScan
    momentum: HalfScan


def scan_fragment(source: Source, head: FragmentHead) -> FragmentScan:
    """Hash and measure a fragment in constant memory."""
    digest = blake2b_128()
    squares = [0.0, 0.0]
    bad = [0, 0]
    for half, piece in _pieces(source, head, digest):
        values = piece
        if not representable(torch.from_numpy(piece), DType.F32):
            finite = np.isfinite(piece)
            bad[half] += piece.size - int(np.count_nonzero(finite))
            values = piece[finite]
        wide = values.astype(np.float64)
        squares[half] += float(np.dot(wide, wide))
    halves = [HalfScan(bad[half], squares[half] ** 0.5) for half in (0, 1)]
    return FragmentScan(digest.hexdigest(), *halves)


def read_values(
    source: Source, head: FragmentHead, half: int, start: int, out: NDArray[np.float32]
) -> None:
    """Fill `out` with values `start`... of params (half 0) or momentum (half 1) of a fragment."""
    at = head.offset + FRAGMENT_HEAD.size + 4 * (half * head.numel + start)
    source.read_into(at, out.view(np.uint8).data)


def _pieces(
    source: Source, head: FragmentHead, digest: hashlib.blake2b
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Read a fragment into one scratch piece after the other, hashing all of it."""
    digest.update(_read(source, head.offset, FRAGMENT_HEAD.size))
    limit = PIECE_BYTES // 4
    scratch = np.empty(min(limit, head.numel), "<f4")
    for half in (0, 1):
        for start in range(0, head.numel, limit):
            piece = scratch[: min(limit, head.numel - start)]
            read_values(source, head, half, start, piece)
            digest.update(piece.view(np.uint8).data)
            yield half, piece


def digest_range(source: Source, start: int, end: int) -> str:
    """The K15 digest of bytes `start` to `end`, read in pieces."""
    digest = blake2b_128()
    scratch = memoryview(bytearray(min(PIECE_BYTES, end - start)))
    for at in range(start, end, PIECE_BYTES):
        piece = scratch[: min(PIECE_BYTES, end - at)]
        source.read_into(at, piece)
        digest.update(piece)
    return digest.hexdigest()


def digest_buffers(*buffers: bytes | memoryview) -> str:
    """The K15 digest of buffers one after the other."""
    digest = blake2b_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def fragment_buffers(state: FragmentState) -> tuple[bytes, memoryview, memoryview]:
    """The section of one fragment, without copying its tensors (K1)."""
    head = FRAGMENT_HEAD.pack(state.version, state.params.numel())
    if state.params.shape != state.momentum.shape:
        raise ValueError("params and momentum of a fragment have the same shape")
    return head, tensor_bytes(state.params), tensor_bytes(state.momentum)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous f32 CPU tensor of shape (numel,)."""
    if tensor.dtype is not torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a checkpoint holds contiguous f32 tensors of shape (numel,)")
    return tensor.detach().numpy().view(np.uint8).data


def _read(source: Source, offset: int, size: int) -> bytes:
    data = bytearray(size)
    source.read_into(offset, memoryview(data))
    return bytes(data)
