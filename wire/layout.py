"""The layout of a model: fragments of whole tensors, and its names (W12, W20, K26).

`NumericLayout` is what HELLO carries and the syncer knows: modes and sizes, no names.
`NamedLayout` is what a learner knows; its fingerprint is the identity of the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from wire.errors import ErrorCode, ProtocolError

MAX_NUMEL = 2**63
LAYOUT_JSON_FORMAT = "yeto-layout-json-v1"
_FINGERPRINT_PREFIX = b"yeto-layout-v1\0"
_FRAGMENT_HEAD = struct.Struct("<BI")
_U64 = struct.Struct("<Q")


class MergeMode(IntEnum):
    """How a fragment's gradients are merged (W12 layout, numerics.md)."""

    AVG = 0
    RDA = 1
    ISO = 2


_MODES = tuple(MergeMode)


class NumericFragment(NamedTuple):
    """One fragment as HELLO describes it.

    Attributes:
        mode: merge mode.
        numels: elements of each tensor, in layout order.
        shapes: (rows, cols) of each tensor for iso fragments, else None.
        numel: elements of the whole fragment.
    """

    mode: MergeMode
    numels: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...] | None
    numel: int


@dataclass(frozen=True)
class NumericLayout:
    """All fragments of a session, in order."""

    fragments: tuple[NumericFragment, ...]

    @cached_property
    def max_numel(self) -> int:
        """Elements of the largest fragment."""
        return max(fragment.numel for fragment in self.fragments)

    def __len__(self) -> int:
        return len(self.fragments)

    def encode(self) -> bytes:
        """The layout section of HELLO (section 5)."""
        parts: list[bytes] = []
        for fragment in self.fragments:
            parts.append(_FRAGMENT_HEAD.pack(fragment.mode, len(fragment.numels)))
            parts.append(np.asarray(fragment.numels, "<u8").tobytes())
            if fragment.shapes is not None:
                parts.append(np.asarray(fragment.shapes, "<u8").tobytes())
        return b"".join(parts)


def numeric_fragment(
    mode: MergeMode,
    numels: Sequence[int],
    shapes: Sequence[tuple[int, int]] | None = None,
) -> NumericFragment:
    """Build a fragment from sizes; `shapes` only (and always) for iso."""
    sizes = tuple(numels)
    return NumericFragment(mode, sizes, None if shapes is None else tuple(shapes), sum(sizes))


LayoutReader = Callable[[memoryview, int], tuple["NumericLayout", int]]
"""`parse_layout`, or what stands in for it."""


def parse_layout(data: memoryview, count: int) -> tuple[NumericLayout, int]:
    """Read `count` fragments from `data`, the bytes after F (W12 steps 5 and 6).

    Returns:
        The layout and how many bytes it took.

    Raises:
        ProtocolError: code `layout`, naming the fragment and the rule.
    """
    if not 1 <= count <= len(data) // 5:
        raise _bad_layout(f"{count} fragments do not fit in {len(data)} bytes")
    fragments: list[NumericFragment] = []
    at = 0
    for index in range(count):
        fragment, at = _parse_fragment(data, at, index)
        fragments.append(fragment)
    return NumericLayout(tuple(fragments)), at


def _parse_fragment(data: memoryview, at: int, index: int) -> tuple[NumericFragment, int]:
    if len(data) - at < 5:
        raise _bad_layout(f"fragment {index} is cut off")
    mode, count = _FRAGMENT_HEAD.unpack_from(data, at)
    at += 5
    if mode > MergeMode.ISO:
        raise _bad_layout(f"fragment {index} has merge mode {mode}, known are 0, 1 and 2")
    if not 1 <= count <= (len(data) - at) // 8:
        raise _bad_layout(f"fragment {index} lists {count} tensors, more or fewer than fit")
    numels = _read_u64(data, at, count)
    at += 8 * count
    if min(numels) < 1:
        raise _bad_layout(f"fragment {index} has a tensor without elements")
    total = sum(numels)
    if total >= MAX_NUMEL:
        raise _bad_layout(f"fragment {index} has 2^63 elements or more")
    shapes = None
    if mode == MergeMode.ISO:
        if len(data) - at < 16 * count:
            raise _bad_layout(f"the iso shapes of fragment {index} are cut off")
        flat = _read_u64(data, at, 2 * count)
        at += 16 * count
        shapes = tuple(zip(flat[::2], flat[1::2], strict=True))
        for numel, (rows, cols) in zip(numels, shapes, strict=True):
            # Python integers do not wrap, so this also refuses products over 2^64 (W2).
            if rows < 1 or cols < 1 or rows * cols != numel:
                raise _bad_layout(f"fragment {index}: {rows} x {cols} is not {numel} elements")
    return NumericFragment(_MODES[mode], numels, shapes, total), at


def _read_u64(data: memoryview, at: int, count: int) -> tuple[int, ...]:
    """`count` u64; a stranger's HELLO may hold millions of tiny fragments, so both ways count."""
    if count == 1:
        return _U64.unpack_from(data, at)
    return tuple(np.frombuffer(data, "<u8", count, at).tolist())


def _bad_layout(sentence: str) -> ProtocolError:
    return ProtocolError(ErrorCode.LAYOUT, sentence)


class StatedFingerprintError(ValueError):
    """A layout document whose stated fingerprint is not that of its tensors (K26)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name and full shape of one trainable tensor; a 0-d tensor has shape ()."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class NamedFragment:
    """One fragment with names and shapes."""

    mode: MergeMode
    tensors: tuple[TensorSpec, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole fragment."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class NamedLayout:
    """A learner's layout: fragment order, merge modes, names and shapes."""

    fragments: tuple[NamedFragment, ...]

    def __len__(self) -> int:
        return len(self.fragments)

    @cached_property
    def numeric(self) -> NumericLayout:
        """What HELLO carries. Iso tensors must be 2-D."""
        return NumericLayout(tuple(map(_numeric, self.fragments)))

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over the canonical encoding of W20, 32 bytes."""
        digest = hashlib.sha256(_FINGERPRINT_PREFIX)
        digest.update(struct.pack("<I", len(self.fragments)))
        for fragment in self.fragments:
            digest.update(_FRAGMENT_HEAD.pack(fragment.mode, len(fragment.tensors)))
            for tensor in fragment.tensors:
                name = tensor.name.encode()
                dims = len(tensor.shape)
                digest.update(struct.pack("<I", len(name)) + name)
                digest.update(struct.pack(f"<QI{dims}Q", tensor.numel, dims, *tensor.shape))
        return digest.digest()

    def to_json(self) -> str:
        """The text of `layout.json` (K26), one line."""
        document = {
            "format": LAYOUT_JSON_FORMAT,
            "fingerprint": self.fingerprint.hex(),
            "fragments": [
                {
                    "mode": fragment.mode.name.lower(),
                    "tensors": [{"name": t.name, "shape": list(t.shape)} for t in fragment.tensors],
                }
                for fragment in self.fragments
            ],
        }
        return json.dumps(document, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> NamedLayout:
        """Read `layout.json` and check its stated fingerprint (K26).

        Raises:
            StatedFingerprintError: its fingerprint is not that of its tensors.
            ValueError: what else is wrong with the document.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != LAYOUT_JSON_FORMAT:
            raise ValueError(f"this is not a {LAYOUT_JSON_FORMAT} document")
        try:
            layout = cls(tuple(_named_from_json(item) for item in document["fragments"]))
            stated = document["fingerprint"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the layout document is malformed at {error}") from error
        if not layout.fragments:
            raise ValueError("the layout document lists no fragments")
        if stated != layout.fingerprint.hex():
            raise StatedFingerprintError(
                f"the layout document states fingerprint {str(stated)[:16]} but its tensors give "
                f"{layout.fingerprint.hex()[:16]}"
            )
        return layout


def _numeric(fragment: NamedFragment) -> NumericFragment:
    numels = tuple(tensor.numel for tensor in fragment.tensors)
    if fragment.mode is not MergeMode.ISO:
        return numeric_fragment(fragment.mode, numels)
    shapes = [(tensor.shape[0], tensor.shape[1]) for tensor in fragment.tensors]
    return numeric_fragment(fragment.mode, numels, shapes)


def _named_from_json(item: dict[str, Any]) -> NamedFragment:
    modes = {mode.name.lower(): mode for mode in MergeMode}
    tensors = []
    for tensor in item["tensors"]:
        shape = tuple(tensor["shape"])
        if not all(
            isinstance(dim, int) and not isinstance(dim, bool) and dim >= 1 for dim in shape
        ):
            raise ValueError(
                f"tensor {tensor['name']!r} has shape {list(shape)}, not whole numbers"
            )
        if not isinstance(tensor["name"], str):
            raise ValueError(f"{tensor['name']!r} is not a tensor name")
        tensors.append(TensorSpec(tensor["name"], shape))
    mode = modes[item["mode"]]
    if not tensors:
        raise ValueError("a fragment of the layout document has no tensors")
    if mode is MergeMode.ISO and any(len(tensor.shape) != 2 for tensor in tensors):
        raise ValueError("an iso fragment of the layout document has a tensor that is not 2-D")
    return NamedFragment(mode, tuple(tensors))
