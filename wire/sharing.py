"""A pool of memory for threads: whole fragments that several of them make and let go of."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from wire.memory import Slab, SlabPool


class SharedPool(SlabPool):
    """A pool that any thread may take from."""

    def __init__(self, keep: int | None = None, *, thrifty: bool = False) -> None:
        super().__init__(keep, thrifty=thrifty)
        self._lock = threading.Lock()

    def take(self, size: int, *, recycled: bool) -> tuple[Slab, memoryview, bool]:
        """See `SlabPool`."""
        with self._lock:
            return super().take(size, recycled=recycled)

    def age(self, now: float) -> None:
        """See `SlabPool`."""
        with self._lock:
            super().age(now)

    def block(self, size: int) -> NDArray[np.uint8]:
        """`size` uninitialized bytes, whole from the start; collected, they come back here."""
        slab, view, used = self.take(size, recycled=True)
        if not used:
            slab.advise(0, size)
        return np.frombuffer(view, np.uint8, size)
