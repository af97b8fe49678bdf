"""Reading the values of a whole checkpoint into memory, hashing and checking them on the way.

A core hashes one section at the speed of hashlib, or several at a time at twice that
(`checkpoint.blake2b`). So fragments are loaded by one thread each where there are cores for all,
and several to a thread where there are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from checkpoint.blake2b import LANES, SectionDigests, blake2b_128, padded_bytes
from checkpoint.codec import PIECE_BYTES, FragmentHead, Source, Structure
from checkpoint.format import FRAGMENT_HEAD
from checkpoint.snapshot import FragmentState
from wire.dtypes import DType
from wire.tensors import load_loops, representable

LOAD_THREADS = 8
"""Groups of fragments read at a time: some wait for the disk, others hash."""
LANES_FROM_BYTES = 16 << 20
"""Below this, compiled loops are not worth loading."""
LANES_FROM_FILL = 0.4
"""Part of the lanes' work that must be of use, or hashlib is as fast."""


class LoadedFragment(NamedTuple):
    """A fragment in memory; `non_finite` names the half that has NaN or Inf, else None."""

    state: FragmentState
    digest: str
    non_finite: str | None


def load_all(source: Source, structure: Structure) -> list[LoadedFragment]:
    """All fragments, in their order; reading, hashing and checking release the GIL.

    Raises:
        CheckpointRefused: `truncated`.
    """
    heads = structure.fragments
    if structure.size >= LANES_FROM_BYTES:
        load_loops()
    groups = grouped([head.size for head in heads], torch.get_num_threads())
    loaded: dict[int, LoadedFragment] = {}
    with ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="checkpoint-load") as threads:
        parts = threads.map(lambda group: load_group(source, [heads[i] for i in group]), groups)
        for group, part in zip(groups, parts, strict=True):
            loaded.update(zip(group, part, strict=True))
    return [loaded[index] for index in range(len(heads))]


def grouped(sizes: Sequence[int], cores: int) -> list[list[int]]:
    """Indices of sections that one thread loads together, the largest first.

    Args:
        sizes: bytes of each section.
        cores: how many threads can run at a time.
    """
    width = max(1, min(LANES, -(-len(sizes) // cores)))
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    groups: list[list[int]] = []
    for start in range(0, len(order), width):
        group = order[start : start + width]
        total = sum(sizes[index] for index in group)
        if total >= LANES_FROM_BYTES and total >= LANES_FROM_FILL * LANES * sizes[group[0]]:
            groups.append(group)
        else:
            groups.extend([index] for index in group)
    return groups


def load_group(source: Source, heads: Sequence[FragmentHead]) -> list[LoadedFragment]:
    """Read 1 to 4 fragments, piece by piece in turn, into new memory: one storage for each."""
    sections = [_Section(head) for head in heads]
    digests = _digests(sections)
    for start in range(0, max(head.size for head in heads), PIECE_BYTES):
        end = start + PIECE_BYTES
        for section in sections:
            section.read(source, start, end)
        digests.advance(end)
        for section in sections:
            section.check(start, end)
    return [
        LoadedFragment(section.state(), digest, section.non_finite)
        for section, digest in zip(sections, digests.hexdigests(), strict=True)
    ]


class _Section:
    """The bytes of one fragment as they stand in the file, padded for the digest.

    Attributes:
        non_finite: the first half with a NaN or Inf in what was checked.
    """

    def __init__(self, head: FragmentHead) -> None:
        self._head = head
        self.size = head.size
        self.padded = np.empty(padded_bytes(head.size) // 8, np.uint64).view(np.uint8)
        self.padded[head.size :] = 0
        values = self.padded[FRAGMENT_HEAD.size : head.size].view("<f4")
        self._halves = {"params": values[: head.numel], "momentum": values[head.numel :]}
        self.non_finite: str | None = None

    def read(self, source: Source, start: int, end: int) -> None:
        """Fill bytes `start` to `end`."""
        if start < self.size:
            out = self.padded[start : min(end, self.size)]
            source.read_into(self._head.offset + start, out.data)

    def check(self, start: int, end: int) -> None:
        """Look at the values in bytes `start` to `end`, all of them whole."""
        if self.non_finite is not None:
            return
        at = FRAGMENT_HEAD.size
        for name, half in self._halves.items():
            piece = half[max(start - at, 0) // 4 : max(end - at, 0) // 4]
            if not representable(torch.from_numpy(piece), DType.F32):
                self.non_finite = name
                return
            at += half.nbytes

    def state(self) -> FragmentState:
        """Version and values, which share the section's memory."""
        params, momentum = (torch.from_numpy(half) for half in self._halves.values())
        return FragmentState(self._head.version, params, momentum)


class _Digests(Protocol):
    def advance(self, end: int) -> None: ...

    def hexdigests(self) -> list[str]: ...


class _OneDigest:
    """`SectionDigests` of one section, by hashlib."""

    def __init__(self, section: NDArray[np.uint8]) -> None:
        self._section = section
        self._digest = blake2b_128()
        self._done = 0

    def advance(self, end: int) -> None:
        self._digest.update(self._section[self._done : end].data)
        self._done = end

    def hexdigests(self) -> list[str]:
        return [self._digest.hexdigest()]


def _digests(sections: Sequence[_Section]) -> _Digests:
    if len(sections) == 1:
        (section,) = sections
        return _OneDigest(section.padded[: section.size])
    return SectionDigests([section.padded for section in sections], [s.size for s in sections])
