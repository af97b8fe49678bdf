"""Host buffers that fragments pass through on their way from the model to the wire.

A fresh buffer costs a page fault per 4 KiB, several times the copy itself, on the training thread.
So a few are kept; with CUDA parameters they are pinned, which the copies need to be asynchronous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 2
"""Buffers kept for reuse: one being encoded, one being filled."""


def pageable(numel: int) -> Tensor:
    """Ordinary host memory for `numel` f32 values."""
    return torch.empty(numel, dtype=torch.float32)


def pinned(numel: int) -> Tensor:
    """Page-locked host memory for `numel` f32 values; needs CUDA."""
    return torch.empty(numel, dtype=torch.float32, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Host:
    """How the host side of copies works for one kind of device.

    Attributes:
        allocate: makes a staging buffer of so many f32 values.
        synchronize: returns when the copies that were begun are done.
        staged: values pass through a staging buffer on their way to the parameters too.
    """

    allocate: Callable[[int], Tensor]
    synchronize: Callable[[], None]
    staged: bool


CPU = Host(pageable, lambda: None, staged=False)
"""Parameters in host memory: copies are done when they return."""
CUDA = Host(pinned, torch.cuda.synchronize, staged=True)
"""Parameters on GPUs: asynchronous copies from and to pinned memory."""


class Staging:
    """Flat f32 buffers of the largest fragment's size. `take` and `give` suit any thread."""

    def __init__(self, numel: int, allocate: Callable[[int], Tensor] = pageable) -> None:
        """
        Args:
            numel: elements of each buffer.
            allocate: makes one.
        """
        self._numel = numel
        self._allocate = allocate
        self._free: deque[Tensor] = deque()

    def take(self) -> Tensor:
        """A buffer with arbitrary content; when all are in use, another one is made."""
        try:
            return self._free.pop()
        except IndexError:
            return self._allocate(self._numel)

    def give(self, buffer: Tensor) -> None:
        """Nobody reads the buffer any more."""
        if len(self._free) < KEPT:
            self._free.append(buffer)
