"""Which tensors travel together: the deterministic partition into fragments (L5-L9).

The result depends on the set of (name, shape) alone, never on the order of the input, so that
every learner of a run builds the same layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from learner.errors import LayoutError
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec

_AVG_WORDS = ("embed", "wte", "wpe", "lm_head", "shared.weight")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.([0-9]+)\.")


def layer_index(name: str) -> int | None:
    """N of the first `.layers.N.`, `.h.N.` or `.blocks.N.` in `name` (L8)."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def partition(
    tensors: Iterable[TensorSpec],
    parts: int,
    *,
    pattern: str = "binpack",
    matrix_merge: str = "rda",
    avg_regex: str | None = None,
) -> NamedLayout:
    """Group whole tensors into fragments; every tensor lands in exactly one.

    Args:
        tensors: names (unique) and full shapes, each of at least one element.
        parts: requested number of fragments P >= 1; the result may have fewer, or one more (L6).
        pattern: `binpack` (L7) or `strided` (L8).
        matrix_merge: `rda`, or `iso`, which averages everything that is not 2-D (L5).
        avg_regex: names it matches (search) join the averaged fragment.

    Raises:
        LayoutError: no tensors, an unknown pattern or merge, parts < 1, or a name given twice.
    """
    specs = sorted(tensors, key=_by_size)
    _check(specs, parts, pattern, matrix_merge)
    mode = MergeMode.ISO if matrix_merge == "iso" else MergeMode.RDA
    extra = None if avg_regex is None else re.compile(avg_regex)
    averaged = [spec for spec in specs if _is_averaged(spec, mode, extra)]
    chosen = {spec.name for spec in averaged}
    rest = [spec for spec in specs if spec.name not in chosen]
    # L6: the averaged fragment takes one of the P places, yet the rest always gets one.
    count = min(max(1, parts - bool(averaged)), len(rest))
    bins: list[list[TensorSpec]] = [[] for _ in range(count)]
    if pattern == "strided":
        _deal_layers(rest, bins)
    else:
        _pack(rest, bins)
    groups = [NamedFragment(mode, tuple(group)) for group in bins if group]
    if averaged:
        groups.insert(0, NamedFragment(MergeMode.AVG, tuple(averaged)))
    return NamedLayout(tuple(groups))


def _by_size(spec: TensorSpec) -> tuple[int, str]:
    return -spec.numel, spec.name


def _is_averaged(spec: TensorSpec, mode: MergeMode, extra: re.Pattern[str] | None) -> bool:
    lowered = spec.name.lower()
    if any(word in lowered for word in _AVG_WORDS):
        return True
    if extra is not None and extra.search(spec.name):
        return True
    return mode is MergeMode.ISO and len(spec.shape) != 2


def _pack(specs: Sequence[TensorSpec], bins: list[list[TensorSpec]]) -> None:
    """Each tensor, largest first, to the emptiest bin; lowest index on ties (L7)."""
    totals = [sum(spec.numel for spec in group) for group in bins]
    for spec in specs:
        target = totals.index(min(totals))
        bins[target].append(spec)
        totals[target] += spec.numel


def _deal_layers(specs: Sequence[TensorSpec], bins: list[list[TensorSpec]]) -> None:
    """The i-th distinct layer to bin i mod bins, then what has no layer by L7 (L8)."""
    layered: dict[int, list[TensorSpec]] = {}
    loose: list[TensorSpec] = []
    for spec in specs:
        index = layer_index(spec.name)
        (loose if index is None else layered.setdefault(index, [])).append(spec)
    for place, index in enumerate(sorted(layered)):
        bins[place % len(bins)].extend(sorted(layered[index], key=lambda spec: spec.name))
    _pack(loose, bins)


def _check(specs: Sequence[TensorSpec], parts: int, pattern: str, matrix_merge: str) -> None:
    if not specs:
        raise LayoutError("there are no trainable tensors to synchronise")
    if parts < 1:
        raise LayoutError(f"fragments {parts} is not >= 1")
    if pattern not in ("binpack", "strided"):
        raise LayoutError(f"fragment pattern {pattern!r} is not one of binpack, strided")
    if matrix_merge not in ("rda", "iso"):
        raise LayoutError(f"matrix merge {matrix_merge!r} is not one of rda, iso")
    seen: set[str] = set()
    for spec in specs:
        if spec.numel < 1:
            raise LayoutError(f"tensor {spec.name!r} has no elements")
        if spec.name in seen:
            raise LayoutError(f"tensor name {spec.name!r} appears twice")
        seen.add(spec.name)
