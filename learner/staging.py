"""How fragments pass between the model's device and the host, and from bf16 to f32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wire.dtypes import DType
from wire.tensors import decode_into


def widen(values: Tensor, out: Tensor) -> None:
    """Write bf16 values as f32, both flat and in host memory."""
    decode_into(values.view(torch.uint8).numpy().data, DType.BF16, 0, out.numpy())


def pageable(numel: int) -> Tensor:
    """Ordinary host memory for `numel` f32 values."""
    return torch.empty(numel, dtype=torch.float32)


def pinned(numel: int) -> Tensor:
    """Page-locked host memory for `numel` f32 values; needs CUDA, which keeps it for reuse."""
    return torch.empty(numel, dtype=torch.float32, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Host:
    """How the host side of copies works for one kind of device.

    Attributes:
        allocate: makes room for so many f32 values on their way from the model; None: as for all.
        synchronize: returns when the copies that were begun are done.
        staged: values pass through such room on their way to the parameters too.
    """

    allocate: Callable[[int], Tensor] | None
    synchronize: Callable[[], None]
    staged: bool


CPU = Host(None, lambda: None, staged=False)
"""Parameters in host memory: copies are done when they return."""
CUDA = Host(pinned, torch.cuda.synchronize, staged=True)
"""Parameters on GPUs: asynchronous copies from and to pinned memory."""
