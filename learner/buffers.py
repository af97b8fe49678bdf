"""Memory for whole fragments, whatever they are: deltas, payloads, anchors, residuals.

A fresh buffer costs a page fault per 4 KiB, several times the copy itself, on the training thread,
and what malloc gets back it may keep. So a fragment lies in a mapping of its own, which serves the
next fragment of about its size once nobody refers to it any more (`wire.memory`).
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from wire.memory import MAPPED_FROM, SlabPool

KEPT = 2
"""Buffers that wait for another use: one for a delta, one for a payload."""
_F32 = 4


class Buffers:
    """Flat f32 host vectors. Any thread may take; dropping the last reference gives back."""

    def __init__(self) -> None:
        self._pool = SlabPool(keep=KEPT)
        self._lock = threading.Lock()

    def take(self, numel: int) -> Tensor:
        """A vector of shape (numel,) with arbitrary content."""
        size = _F32 * numel
        if size < MAPPED_FROM:
            return torch.empty(numel, dtype=torch.float32)
        with self._lock:
            slab, block, used = self._pool.take(size, recycled=True)
        if not used:
            slab.advise(0, size)
        return torch.from_numpy(np.frombuffer(block, np.float32, numel))
