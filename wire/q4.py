"""q4 E3M0: blocks of 256 values, an f32 scale and 4-bit codes (wire.md W53 to W55).

Plain numpy on groups of blocks that stay in cache; every step releases the GIL.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wire.dtypes import Q4_BLOCK, Q4_BLOCK_BYTES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GROUP = 256
"""Blocks handled at a time: 64 Ki values."""

THRESHOLDS = np.array(
    [0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3], np.uint32
).view(np.float32)
"""Smallest f32 ratio |v| / scale of the levels 1 to 7 (table of W54)."""

_POSITIVE = [0.0] + [2.0 ** (level - 7) for level in range(1, 8)]
_NIBBLES = np.array(_POSITIVE + [-value for value in _POSITIVE], np.float32)
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=1).view(np.uint64)[:, 0]
"""Both values of a byte, low nibble first (W53), as one 64-bit item: half the look-ups."""


def encode(values: Floats) -> Bytes:
    """q4 bytes of finite f32 values, shape (132 * ceil(n / 256),) (W53, W54)."""
    blocks = -(-len(values) // Q4_BLOCK)
    whole = len(values) // Q4_BLOCK
    table = np.empty((blocks, Q4_BLOCK_BYTES), np.uint8)
    rows = values[: whole * Q4_BLOCK].reshape(whole, Q4_BLOCK)
    for first in range(0, whole, GROUP):
        _encode_blocks(rows[first : first + GROUP], table[first : first + GROUP])
    if whole < blocks:
        tail = np.zeros((1, Q4_BLOCK), np.float32)
        tail[0, : len(values) - whole * Q4_BLOCK] = values[whole * Q4_BLOCK :]
        _encode_blocks(tail, table[whole:])
    return table.reshape(-1)


def decode_into(data: Bytes, first: int, out: Floats) -> None:
    """Write the values first, first + 1, … of q4 bytes to the contiguous `out` (W55).

    `first` and the length need no alignment to blocks; codes past the end are ignored.
    """
    table = data.reshape(-1, Q4_BLOCK_BYTES)
    done = 0
    while done < len(out):
        block, skip = divmod(first + done, Q4_BLOCK)
        whole = min((len(out) - done) // Q4_BLOCK, GROUP) if skip == 0 else 0
        if whole:
            target = out[done : done + whole * Q4_BLOCK]
            _decode_blocks(table[block : block + whole], target)
            done += whole * Q4_BLOCK
        else:
            count = min(Q4_BLOCK - skip, len(out) - done)
            scratch = np.empty(Q4_BLOCK, np.float32)
            _decode_blocks(table[block : block + 1], scratch)
            out[done : done + count] = scratch[skip : skip + count]
            done += count


def scales_are_legal(data: Bytes) -> bool:
    """Whether every scale is finite and not negative; -0.0 passes (W55)."""
    scales = _scales(data.reshape(-1, Q4_BLOCK_BYTES))
    return bool(((scales >= 0) & (scales < np.inf)).all())


def _encode_blocks(values: Floats, out: Bytes) -> None:
    magnitude = np.abs(values)
    scale = magnitude.max(axis=1, keepdims=True)
    out[:, :4] = scale.view(np.uint8)
    ratio = np.divide(magnitude, np.where(scale > 0, scale, np.float32(1)), out=magnitude)
    level = np.zeros(values.shape, np.uint8)
    reached = np.empty(values.shape, np.bool_)
    for threshold in THRESHOLDS:
        level += np.greater_equal(ratio, threshold, out=reached).view(np.uint8)
    np.less(values, 0, out=reached)
    reached &= level > 0
    level |= reached.view(np.uint8) << 3
    pairs = level.view("<u2")
    np.copyto(out[:, 4:], pairs | pairs >> 4, casting="unsafe")


def _decode_blocks(table: Bytes, out: Floats) -> None:
    rows = out.reshape(len(table), Q4_BLOCK)
    codes = rows.view(np.uint64)
    if not codes.flags.aligned:
        codes = np.empty_like(codes)
    # An out argument and "clip" keep numpy from taking a second buffer.
    np.take(_PAIRS, table[:, 4:], out=codes, mode="clip")
    scales = _scales(table)[:, None]
    signs = codes.view(np.float32)
    np.multiply(signs, scales, out=rows)
    negative_zero = np.signbit(scales[:, 0])
    if negative_zero.any():
        _decode_negative_zero(table, rows, negative_zero)


def _decode_negative_zero(table: Bytes, rows: Floats, which: NDArray[np.bool_]) -> None:
    """Blocks of scale -0.0: codes of level 0 keep their own sign (W55)."""
    codes = _PAIRS[table[which, 4:]].view(np.float32)
    rows[which] = np.where(codes == 0, codes, codes * np.float32(-0.0))


def _scales(table: Bytes) -> Floats:
    return np.ascontiguousarray(table[:, :4]).view("<f4")[:, 0]
