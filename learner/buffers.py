"""Memory for whole fragments, whatever they are: deltas, payloads, anchors, residuals, messages.

A fresh buffer costs a page fault per 4 KiB, several times the copy itself, on the training thread,
and what malloc gets back it may keep. So a fragment lies in a mapping of its own, which serves the
next fragment of about its size once nobody refers to it any more (`wire.memory`). What arrives
lies there too: the memory of a payload that has left takes the next broadcast.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire.memory import MAPPED_FROM
from wire.sharing import SharedPool

_F32 = 4
_FRAME = 64
"""Bytes over those of the values, so that the memory takes a message of as many too."""


class Buffers:
    """Flat host vectors. Any thread may take; dropping the last reference gives back.

    Attributes:
        pool: where they come from; never more than were in use at once.
    """

    def __init__(self) -> None:
        self.pool = SharedPool(thrifty=True)

    def take(self, numel: int) -> Tensor:
        """A f32 vector of shape (numel,) with arbitrary content."""
        return torch.from_numpy(self.bytes(_F32 * numel).view(np.float32))

    def bytes(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes with arbitrary content, aligned to 64."""
        if size < MAPPED_FROM:
            return torch.empty(size, dtype=torch.uint8).numpy()
        return self.pool.block(size + _FRAME)[:size]
