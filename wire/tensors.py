"""Tensor codecs: f32, bf16 and q4 bytes <-> f32 tensors (wire.md section 12).

Tensors are one-dimensional, contiguous, f32, on the CPU. Everything here releases the GIL, needs no
temporary of full size and starts no threads of its own. Scans may run on an event loop, which must
not wait for a compiler: they are plain numpy until `load_loops` has run in another thread.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire import q4
from wire.compiled import as_f32, compiled, loaded
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.messages import Buffer

SMALL = 4096
"""Values up to which a finite scan is not worth a compiled loop."""
PIECE = 64 * 1024
"""Values that a scan without a compiled loop takes at a time."""

_FEW_BYTES = 1024
_MAGNITUDE = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}
"""All bits but the sign, by size of the element."""
_WORD_MAGNITUDE, _HALF_MAGNITUDE = _MAGNITUDE[4], _MAGNITUDE[2]
_F32_INFINITY = 0x7F800000
_BF16_INFINITY = 0x7F80
_BF16_OVERFLOW = 0x7F7F8000
BF16_OVERFLOW = np.uint32(_BF16_OVERFLOW).view(np.float32)
"""Smallest f32 magnitude that rounds to infinity in bf16, 3.3961775e38 (W52)."""


class NonFiniteValues(ValueError):
    """Values that this side wanted to send are not finite, or not in the wire dtype (W52, W54)."""


def encode(values: Tensor, dtype: DType) -> memoryview:
    """Bytes of `values` in `dtype`, `dtype.size(n)` of them.

    Args:
        values: f32, shape (n,), contiguous, CPU.
        dtype: f32 (the result is a view of the tensor's memory), bf16 (nearest even) or q4.

    Raises:
        NonFiniteValues: NaN, infinity, or a magnitude that rounds to infinity in bf16.
    """
    array = values.detach().numpy()
    data: NDArray[Any] | None
    if dtype is DType.Q4:
        data = q4.encode(array)
    elif dtype is DType.BF16:
        data = np.empty(len(array), np.uint16)
        if not _narrow(array.view(np.uint32), data):
            data = None
    else:
        data = array if representable(values, dtype) else None
    if data is None:
        raise NonFiniteValues(f"a value is not finite in {dtype.label}")
    return data.view(np.uint8).data


def decode(data: Buffer, dtype: DType, numel: int, *, copy: bool = True) -> Tensor:
    """f32 tensor of shape (numel,) from wire bytes.

    Args:
        data: exactly `dtype.size(numel)` bytes.
        copy: False lets an f32 result share the memory of `data`, when that is writable.

    Raises:
        ProtocolError: `bad-length`, or `non-finite` (W51, W55).
    """
    if len(data) != dtype.size(numel):
        raise ProtocolError(
            ErrorCode.BAD_LENGTH,
            f"{len(data)} bytes for {numel} {dtype.label} values, expected {dtype.size(numel)}",
        )
    check_finite(data, dtype)
    if dtype is DType.F32 and not copy:
        array = np.frombuffer(data, np.float32)
        if array.flags.writeable:
            return torch.from_numpy(array)
    out = empty(numel)
    decode_into(data, dtype, 0, out.numpy())
    return out


def empty(numel: int) -> Tensor:
    """Uninitialized f32 tensor of shape (numel,).

    numpy asks for huge pages where torch does not: first touch of a large tensor costs a quarter.
    """
    return torch.from_numpy(np.empty(numel, np.float32))


def decode_into(data: Buffer, dtype: DType, first: int, out: NDArray[np.float32]) -> None:
    """Decode the values first, first + 1, … of a checked payload into `out`.

    Args:
        data: payload of a whole fragment, at any address.
        out: f32, contiguous; its length says how many values.
    """
    if dtype is DType.Q4:
        q4.decode_into(np.frombuffer(data, np.uint8), first, out)
    elif dtype is DType.BF16:
        halves = np.frombuffer(data, np.uint16, len(out), 2 * first)
        _widen(halves, out)
    else:
        np.copyto(out, np.frombuffer(data, np.float32, len(out), 4 * first))


def check_finite(data: Buffer, dtype: DType) -> None:
    """Scan wire bytes without decoding them (W11): finite values, finite q4 scales >= 0.

    Raises:
        ProtocolError: `non-finite`.
    """
    if dtype is DType.Q4:
        finite = q4.scales_are_legal(np.frombuffer(data, np.uint8))
    elif dtype is DType.BF16:
        finite = _magnitudes_below(np.frombuffer(data, np.uint16), _BF16_INFINITY)
    elif len(data) <= _FEW_BYTES:
        # Finite f32 values can't overflow the f64 sum; this takes a fifth of the array's way.
        finite = math.isfinite(sum(memoryview(data).cast("f")))
    else:
        finite = _magnitudes_below(np.frombuffer(data, np.uint32), _F32_INFINITY)
    if not finite:
        raise ProtocolError(
            ErrorCode.NON_FINITE,
            "a q4 scale is negative or not finite"
            if dtype is DType.Q4
            else f"a {dtype.label} value is not finite",
        )


def representable(values: Tensor, dtype: DType) -> bool:
    """Whether every f32 value is finite in `dtype` (N23, W52, W54)."""
    limit = _BF16_OVERFLOW if dtype is DType.BF16 else _F32_INFINITY
    return _magnitudes_below(values.detach().numpy().view(np.uint32), limit)


def load_loops() -> None:
    """Compile the loops of this module, or load them; a second or so on a machine's first use."""
    words, halves = np.zeros(1, np.uint32), np.zeros(1, np.uint16)
    _largest_word(_read_only(words))
    _largest_half(_read_only(halves))
    _narrow(words, halves)
    _widen(halves, np.zeros(1, np.float32))


def _magnitudes_below(bits: NDArray[Any], limit: int) -> bool:
    """Whether every value, as integer bits without the sign, is below `limit`."""
    loop = _largest_word if bits.itemsize == 4 else _largest_half
    if len(bits) > SMALL and bits.flags.aligned and loaded(loop):
        return bool(loop(_read_only(bits)) < limit)
    mask = _MAGNITUDE[bits.itemsize]
    pieces = (bits[first : first + PIECE] for first in range(0, len(bits), PIECE))
    return all((piece & mask).max() < limit for piece in pieces)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory; one type of array for the compiler, whatever it lies in."""
    view = array.view()
    view.flags.writeable = False
    return view


# Compiled integer operations yield 64 bits. Narrowed at once, eight or sixteen values fit in a
# vector register: 70 GB/s from the cache of one test machine, where 64 bits reach 22.


@compiled
def _largest_word(bits: NDArray[np.uint32]) -> np.uint32:
    """The largest value without the sign: one pass over memory, without a temporary."""
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, np.uint32(bits[i] & _WORD_MAGNITUDE))
    return largest


@compiled
def _largest_half(bits: NDArray[np.uint16]) -> np.uint16:
    """The same for bf16."""
    largest = np.uint16(0)
    for i in range(len(bits)):
        largest = max(largest, np.uint16(bits[i] & _HALF_MAGNITUDE))
    return largest


@compiled
def _narrow(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> bool:
    """bf16 of f32 bits, to nearest, ties to even; whether all stay finite (W52)."""
    largest = np.uint32(0)
    for i in range(len(bits)):
        value = bits[i]
        largest = max(largest, value & np.uint32(0x7FFFFFFF))
        tie = (value >> np.uint32(16)) & np.uint32(1)
        out[i] = np.uint16((value + np.uint32(0x7FFF) + tie) >> np.uint32(16))
    return bool(largest < _BF16_OVERFLOW)


@compiled
def _widen(halves: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """f32 of bf16 (W52)."""
    for i in range(len(out)):
        out[i] = as_f32(halves[i])
