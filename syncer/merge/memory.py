"""Memory for the results of merges, used again once nothing refers to an older result.

A fresh page is zeroed by the kernel before the merge writes it, which costs nearly as much as the
merge. In a steady run each round retires as much as it makes: the fragment's old parameters and
momentum, when the checkpoint and the broadcasts have let go of them too.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from wire.memory import MAPPED_FROM
from wire.sharing import SharedPool

KEPT = 4
"""Retired tensors that wait for a merge: those of two rounds at once."""

Floats = NDArray[np.float32]


class ResultMemory:
    """Uninitialized f32 arrays for parameters and momentum. Any thread may ask."""

    def __init__(self) -> None:
        self._pool = SharedPool(KEPT)

    def take(self, numel: int) -> Floats:
        """An array of shape (numel,); its memory comes back by itself when it is collected."""
        size = 4 * numel
        if size < MAPPED_FROM:
            return np.empty(numel, np.float32)
        self._pool.age(time.monotonic())
        return self._pool.block(size).view(np.float32)
