"""q4 E3M0: blocks of 256 values, an f32 scale and 4-bit codes (wire.md W53 to W55)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wire.compiled import compiled
from wire.dtypes import Q4_BLOCK, Q4_BLOCK_BYTES

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

THRESHOLDS = np.array(
    [0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3], np.uint32
).view(np.float32)
"""Smallest f32 ratio |v| / scale of the levels 1 to 7 (table of W54)."""

_T1, _T2, _T3, _T4, _T5, _T6, _T7 = THRESHOLDS
_SCALE_BYTES = 4
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)


def encode(values: Floats) -> Bytes | None:
    """q4 bytes of f32 values, 132 * ceil(n / 256) of them (W53, W54); None if one is not finite."""
    blocks = -(-len(values) // Q4_BLOCK)
    whole = len(values) // Q4_BLOCK
    table = np.empty((blocks, Q4_BLOCK_BYTES), np.uint8)
    scales = np.empty(blocks, np.uint32)
    _encode_blocks(values[: whole * Q4_BLOCK], table[:whole], scales[:whole])
    if whole < blocks:
        tail = np.zeros(Q4_BLOCK, np.float32)
        tail[: len(values) - whole * Q4_BLOCK] = values[whole * Q4_BLOCK :]
        _encode_blocks(tail, table[whole:], scales[whole:])
    table[:, :4] = scales.astype("<u4").view(np.uint8).reshape(blocks, 4)
    return table.reshape(-1) if (scales < _INFINITY).all() else None


def decode_into(data: Bytes, first: int, out: Floats) -> None:
    """Write the values first, first + 1, … of q4 bytes to the contiguous `out` (W55).

    `first` and the length need no alignment to blocks; codes past the end are ignored.
    """
    begin, skip = divmod(first, Q4_BLOCK)
    end = -(-(first + len(out)) // Q4_BLOCK)
    table = data.reshape(-1, Q4_BLOCK_BYTES)[begin:end]
    if skip == 0 and len(out) % Q4_BLOCK == 0:
        _decode_blocks(table, _scales(table), out.view(np.uint32), out)
    else:
        values = np.empty(len(table) * Q4_BLOCK, np.float32)
        _decode_blocks(table, _scales(table), values.view(np.uint32), values)
        out[:] = values[skip : skip + len(out)]


def scales_are_legal(data: Bytes) -> bool:
    """Whether every scale is finite and not negative; -0.0 passes (W55)."""
    scales = _scales(data.reshape(-1, Q4_BLOCK_BYTES))
    return bool(((scales >= 0) & (scales < np.inf)).all())


def _scales(table: Bytes) -> Floats:
    return np.ascontiguousarray(table[:, :4]).view("<f4")[:, 0]


@compiled
def _encode_blocks(values: Floats, table: Bytes, scales: Words) -> None:
    """Codes of whole blocks, and the bits of their scales, which go to the table afterwards.

    A scale is at least infinity if a value is not finite.

    Magnitudes are compared as integers, which orders NaN above all numbers.
    """
    nibbles = np.empty(Q4_BLOCK, np.uint8)
    pairs = nibbles.view(np.uint16)
    for block in range(len(scales)):
        part = values[block * Q4_BLOCK : (block + 1) * Q4_BLOCK]
        bits = part.view(np.uint32)
        largest = np.uint32(0)
        for i in range(Q4_BLOCK):
            largest = max(largest, bits[i] & _MAGNITUDE)
        scales[block] = largest
        scale = scales[block : block + 1].view(np.float32)[0]
        divisor = scale if largest > 0 else np.float32(1)
        for i in range(Q4_BLOCK):
            ratio = abs(part[i]) / divisor
            level = (
                np.uint32(ratio >= _T1)
                + np.uint32(ratio >= _T2)
                + np.uint32(ratio >= _T3)
                + np.uint32(ratio >= _T4)
                + np.uint32(ratio >= _T5)
                + np.uint32(ratio >= _T6)
                + np.uint32(ratio >= _T7)
            )
            sign = (bits[i] & _SIGN) >> np.uint32(28)
            nibbles[i] = np.uint8(level | (sign if level > 0 else np.uint32(0)))
        for i in range(Q4_BLOCK // 2):
            table[block, _SCALE_BYTES + i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))


@compiled
def _decode_blocks(table: Bytes, scales: Floats, bits: Words, out: Floats) -> None:
    """Values of whole blocks; `bits` is the same memory as `out`."""
    for block in range(len(scales)):
        part = out[block * Q4_BLOCK : (block + 1) * Q4_BLOCK]
        part_bits = bits[block * Q4_BLOCK : (block + 1) * Q4_BLOCK]
        scale = scales[block]
        # A scale of -0.0 would turn the sign of level 0, which is to stay as it is coded.
        zero = scales[block : block + 1].view(np.uint32)[0] & _SIGN
        for i in range(Q4_BLOCK // 2):
            code = np.uint32(table[block, _SCALE_BYTES + i])
            low = code & np.uint32(7)
            high = (code >> np.uint32(4)) & np.uint32(7)
            # 2^(level - 7) has the exponent field level + 120.
            low = (low + np.uint32(120)) << np.uint32(23) if low > 0 else zero
            high = (high + np.uint32(120)) << np.uint32(23) if high > 0 else zero
            part_bits[2 * i] = low ^ ((code << np.uint32(28)) & _SIGN)
            part_bits[2 * i + 1] = high ^ ((code << np.uint32(24)) & _SIGN)
        for i in range(Q4_BLOCK):
            part[i] *= scale
