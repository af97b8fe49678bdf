"""Which fragments of two files differ, and by how much; both are streamed (`diff`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint.codec import (
    PIECE_BYTES,
    FragmentHead,
    Source,
    Structure,
    read_header,
    read_structure,
    read_values,
)
from checkpoint.inspection import HALVES, open_source


@dataclass(slots=True)
class HalfDifference:
    """Params or momentum of one fragment in two files.

    Attributes:
        unequal: values whose bits differ.
        largest: largest absolute difference of finite values.
        squares: sum of squared differences of finite values.
        norm_squares: sum of squared finite values of the first file, for scale.
    """

    unequal: int = 0
    largest: float = 0.0
    squares: float = 0.0
    norm_squares: float = 0.0

    def add(self, first: NDArray[np.float32], second: NDArray[np.float32]) -> None:
        """Take one more pair of pieces into account."""
        changed = first.view(np.uint32) != second.view(np.uint32)
        self.unequal += int(np.count_nonzero(changed))
        finite = np.isfinite(first) & np.isfinite(second)
        scale = first[finite].astype(np.float64)
        delta = second[finite].astype(np.float64) - scale
        self.norm_squares += float(np.dot(scale, scale))
        self.squares += float(np.dot(delta, delta))
        if delta.size:
            self.largest = max(self.largest, float(np.abs(delta).max()))

    def to_json(self) -> dict[str, Any]:
        """Counts and f64 measures; `relative` is null where the first file's values are 0."""
        norm = math.sqrt(self.norm_squares)
        distance = math.sqrt(self.squares)
        return {
            "unequal": self.unequal,
            "max_abs": self.largest,
            "l2": distance,
            "relative": distance / norm if norm else None,
        }


def compare_files(first: Path, second: Path) -> dict[str, Any]:
    """The object that `diff --json` prints.

    Raises:
        CheckpointRefused: one of the files is not readable.
    """
    with open_source(first) as a, open_source(second) as b:
        left = read_structure(a, read_header(a))
        right = read_structure(b, read_header(b))
        fragments = [
            _compare_fragment(index, (a, b), heads)
            for index, heads in enumerate(zip(left.fragments, right.fragments, strict=False))
        ]
    facts = _compare_facts(left, right)
    return {
        "a": str(first),
        "b": str(second),
        "equal": not facts and not any(fragment["differs"] for fragment in fragments),
        "facts": facts,
        "fragments": fragments,
    }


def _compare_facts(left: Structure, right: Structure) -> dict[str, tuple[Any, Any]]:
    """Everything beside the fragments that differs: name -> (first, second)."""
    sides = [
        {
            "revision": side.header.revision,
            "backend": side.header.backend,
            "global_step": side.header.global_step,
            "num_fragments": side.header.num_fragments,
            "header_fingerprint": (side.header.fingerprint or b"").hex(),
            "trailer_fingerprint": (side.trailer.fingerprint or b"").hex(),
            "contract": (side.trailer.contract or b"").hex(),
            "trailer": side.trailer.form.label,
            "ledger": sorted(side.ledger.tolist()),
        }
        for side in (left, right)
    ]
    return {
        key: (sides[0][key], sides[1][key]) for key in sides[0] if sides[0][key] != sides[1][key]
    }


def _compare_fragment(
    index: int, sources: tuple[Source, Source], heads: tuple[FragmentHead, FragmentHead]
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": index,
        "versions": [head.version for head in heads],
        "numels": [head.numel for head in heads],
    }
    same_size = heads[0].numel == heads[1].numel
    if same_size:
        for half, name in enumerate(HALVES):
            result[name] = _compare_half(sources, heads, half).to_json()
    result["differs"] = (
        not same_size
        or heads[0].version != heads[1].version
        or any(result[name]["unequal"] for name in HALVES)
    )
    return result


def _compare_half(
    sources: tuple[Source, Source], heads: tuple[FragmentHead, FragmentHead], half: int
) -> HalfDifference:
    found = HalfDifference()
    numel = heads[0].numel
    limit = PIECE_BYTES // 4
    scratch = [np.empty(min(limit, numel), "<f4") for _ in sources]
    for start in range(0, numel, limit):
        pieces = [piece[: min(limit, numel - start)] for piece in scratch]
        for source, head, piece in zip(sources, heads, pieces, strict=True):
            read_values(source, head, half, start, piece)
        found.add(pieces[0], pieces[1])
    return found
