"""q4 E3M0: blocks of 256 values, an f32 scale and 4-bit codes (wire.md W53 to W55)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wire.dtypes import Q4_BLOCK, Q4_BLOCK_BYTES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

THRESHOLD_BITS = (
    0x3C3504F2,
    0x3CB504F6,
    0x3D3504F2,
    0x3DB504F5,
    0x3E3504F3,
    0x3EB504F4,
    0x3F3504F3,
)
"""Smallest f32 ratio |v| / scale of the levels 1 to 7, as bits (table of W54)."""

_THRESHOLDS = np.array(THRESHOLD_BITS, np.uint32).view(np.float32)
_MAGNITUDES = [0.0] + [2.0 ** (level - 7) for level in range(1, 8)]
_NIBBLES = np.array(_MAGNITUDES + [-value for value in _MAGNITUDES], np.float32)
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=1)
"""Both values of each byte, low nibble first (W53)."""

_GROUP = 256
"""Blocks handled at a time: 64 Ki values."""


def encode(values: Floats) -> Bytes:
    """q4 bytes of finite f32 values, shape (132 * ceil(n / 256),) (W53, W54)."""
    blocks = -(-len(values) // Q4_BLOCK)
    out = np.empty((blocks, Q4_BLOCK_BYTES), np.uint8)
    for first in range(0, blocks, _GROUP):
        group = values[first * Q4_BLOCK : (first + _GROUP) * Q4_BLOCK]
        _encode_group(_padded(group).reshape(-1, Q4_BLOCK), out[first : first + _GROUP])
    return out.reshape(-1)


def decode(data: Bytes, out: Floats) -> None:
    """Write the values of q4 bytes to `out`, shape (n,); codes past n are ignored (W55)."""
    table = data.reshape(-1, Q4_BLOCK_BYTES)
    whole = len(out) // Q4_BLOCK
    target = out[: whole * Q4_BLOCK].reshape(whole, Q4_BLOCK)
    for first in range(0, whole, _GROUP):
        rows = slice(first, min(first + _GROUP, whole))
        np.multiply(_codes(table[rows]), _scales(table[rows]), out=target[rows])
    if whole < len(table):
        tail = _codes(table[whole:]) * _scales(table[whole:])
        out[whole * Q4_BLOCK :] = tail.reshape(-1)[: len(out) - whole * Q4_BLOCK]


def scales_are_legal(data: Bytes) -> bool:
    """Whether every scale is finite and not negative; -0.0 passes (W55)."""
    scales = _scales(data.reshape(-1, Q4_BLOCK_BYTES))
    return bool(((scales >= 0) & (scales < np.inf)).all())


def _padded(values: Floats) -> Floats:
    missing = -len(values) % Q4_BLOCK
    return np.pad(values, (0, missing)) if missing else values


def _encode_group(values: Floats, out: Bytes) -> None:
    magnitude = np.abs(values)
    scale = magnitude.max(axis=1, keepdims=True)
    out[:, :4] = scale.view(np.uint8)
    ratio = np.divide(magnitude, scale, out=np.zeros_like(magnitude), where=scale > 0)
    level = np.zeros(values.shape, np.uint8)
    for threshold in _THRESHOLDS:
        level += ratio >= threshold
    code = level | (((values < 0) & (level > 0)).view(np.uint8) << 3)
    np.bitwise_or(code[:, 0::2], code[:, 1::2] << 4, out=out[:, 4:])


def _codes(table: Bytes) -> Floats:
    codes: Floats = _PAIRS[table[:, 4:]]
    return codes.reshape(len(table), Q4_BLOCK)


def _scales(table: Bytes) -> Floats:
    return np.ascontiguousarray(table[:, :4]).view("<f4")
