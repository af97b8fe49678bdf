"""Tensor codecs: f32, bf16 and q4 bytes <-> f32 tensors (wire.md section 12).

Tensors are one-dimensional, contiguous, f32, on the CPU. Work is done in blocks that stay in cache;
large blocks release the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire import q4
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.messages import Buffer

BLOCK = 64 * 1024
"""Values handled at a time: 256 KiB of f32."""

_F32_INFINITY = 0x7F800000
_BF16_OVERFLOW = 0x7F7F8000
"""Bits of the smallest f32 magnitude that rounds to infinity in bf16, 3.3961775e38 (W52)."""


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
    if not representable(values, dtype):
        raise NonFiniteValues(f"a value is not finite in {dtype.label}")
    if dtype is DType.F32:
        return values.numpy().view(np.uint8).data
    if dtype is DType.BF16:
        return values.to(torch.bfloat16).view(torch.uint8).numpy().data
    return q4.encode(values.numpy()).data


def decode(data: Buffer, dtype: DType, numel: int, *, copy: bool = True) -> Tensor:
    """f32 tensor of shape (numel,) from wire bytes.

    Args:
        data: exactly `dtype.size(numel)` bytes.
        copy: False lets an f32 result share the memory of `data`.

    Raises:
        ProtocolError: `bad-length`, or `non-finite` (W51, W55).
    """
    _check_length(data, dtype, numel)
    check_finite(data, dtype)
    if dtype is DType.F32 and not copy:
        return torch.from_numpy(np.frombuffer(data, np.float32))
    out = torch.empty(numel, dtype=torch.float32)
    if dtype is DType.F32:
        np.copyto(out.numpy(), np.frombuffer(data, np.float32))
    elif dtype is DType.BF16:
        np.left_shift(
            np.frombuffer(data, np.uint16), 16, out=out.numpy().view(np.uint32), dtype=np.uint32
        )
    else:
        q4.decode(np.frombuffer(data, np.uint8), out.numpy())
    return out


def check_finite(data: Buffer, dtype: DType) -> None:
    """Scan wire bytes without decoding them (W11): finite values, finite q4 scales >= 0.

    Raises:
        ProtocolError: `non-finite`.
    """
    if dtype is DType.Q4:
        finite = q4.scales_are_legal(np.frombuffer(data, np.uint8))
    elif dtype is DType.BF16:
        finite = _magnitudes_below(np.frombuffer(data, np.uint16), 0x7F80)
    else:
        finite = _magnitudes_below(np.frombuffer(data, np.uint32), _F32_INFINITY)
    if not finite:
        raise ProtocolError(ErrorCode.NON_FINITE, f"a {dtype.label} tensor has a non-finite value")


def representable(values: Tensor, dtype: DType) -> bool:
    """Whether every f32 value is finite in `dtype` (N23, W52, W54)."""
    limit = _BF16_OVERFLOW if dtype is DType.BF16 else _F32_INFINITY
    return _magnitudes_below(values.numpy().view(np.uint32), limit)


def _magnitudes_below(bits: NDArray[Any], limit: int) -> bool:
    """Whether every value, as integer bits without the sign, is below `limit`."""
    mask = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    blocks = (bits[at : at + BLOCK] for at in range(0, len(bits), BLOCK))
    return all(bool((block & mask).max() < limit) for block in blocks)


def _check_length(data: Buffer, dtype: DType, numel: int) -> None:
    if len(data) != dtype.size(numel):
        raise ProtocolError(
            ErrorCode.BAD_LENGTH,
            f"{len(data)} bytes for {numel} {dtype.label} values, expected {dtype.size(numel)}",
        )
