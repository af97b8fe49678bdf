"""Memory for arriving messages (W6, W32): it costs nothing until bytes land, and it is used again.

A large message lies in a mapping of its own, a slab. A fresh slab is zeroed by the kernel page by
page as bytes land in it, which costs as much as receiving them; so a slab whose message nobody
refers to any more goes back to a pool and serves the next message of about its size.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np

from wire.errors import ErrorCode, ProtocolError

HUGE = 2 * 1024 * 1024
"""Bytes of a huge page; slices at least this long are given them."""
MAPPED_FROM = 256 * 1024
"""Messages from this size on live in a slab."""
IDLE_SECONDS = 60.0
"""How long a pool keeps a slab that nobody uses."""

_CAN_ADVISE = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_NOHUGEPAGE")


class Slab:
    """A private mapping, aligned to huge pages where the system has them.

    Attributes:
        capacity: usable bytes.
    """

    __slots__ = ("__weakref__", "_base", "_map", "_whole", "capacity", "idle_since")

    def __init__(self, size: int) -> None:
        self.capacity = -(-size // HUGE) * HUGE if size > HUGE else size
        self.idle_since = 0.0
        # What is left over of the last huge page would take all of it.
        self._whole = size // HUGE * HUGE
        self._base = 0
        extra = HUGE if _CAN_ADVISE else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.capacity + extra, flags=flags)
        if _CAN_ADVISE:
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
            self._base = -np.frombuffer(self._map, np.uint8).ctypes.data % HUGE

    def lend(self, returned: deque[Slab]) -> memoryview:
        """All of it; goes to `returned` once the last view of it, in any thread, is gone."""
        block = np.frombuffer(self._map, np.uint8, self.capacity, self._base)
        weakref.finalize(block, returned.append, self).atexit = False
        return block.data

    def advise(self, start: int, end: int) -> None:
        """Use huge pages for [start, end), rounded outwards but for the end of the slab."""
        first = self._base + start // HUGE * HUGE
        last = min(self._base - (-end // HUGE) * HUGE, self._base + self._whole)
        if last <= first:
            return
        with contextlib.suppress(OSError):  # advice only: without it memory is merely slower
            self._map.madvise(mmap.MADV_HUGEPAGE, first, last - first)


class SlabPool:
    """Slabs that wait for another message. Taken from by one thread, given back to by any."""

    def __init__(self, keep: int | None = None, *, thrifty: bool = False) -> None:
        """
        Args:
            keep: how many may wait, the ones used last; None: any number.
            thrifty: a fresh slab takes the place of as many bytes that wait, so that all slabs
                together never take more than those in use at once have taken.
        """
        self._keep = keep
        self._thrifty = thrifty
        self._idle: list[Slab] = []
        self._returned: deque[Slab] = deque()

    def take(self, size: int, *, recycled: bool) -> tuple[Slab, memoryview, bool]:
        """A slab of at least `size` bytes, its memory, and whether it was used before.

        Args:
            recycled: whether a used slab will do. It takes memory whole from the start, a fresh
                one only where bytes land.

        Raises:
            MemoryError, OSError, OverflowError: the system refuses.
        """
        self._collect(0.0)
        fitting = [slab for slab in self._idle if size <= slab.capacity <= size + size // 4 + HUGE]
        if recycled and fitting:
            slab = min(fitting, key=lambda candidate: candidate.capacity)
            self._idle.remove(slab)
            return slab, slab.lend(self._returned), True
        replaced = 0
        while self._thrifty and self._idle and replaced < size:
            replaced += self._idle.pop(0).capacity
        slab = Slab(size)
        return slab, slab.lend(self._returned), False

    def age(self, now: float) -> None:
        """Let go of what has been idle for `IDLE_SECONDS`; to be called every few seconds."""
        self._collect(now)
        self._idle = [slab for slab in self._idle if now - slab.idle_since < IDLE_SECONDS]

    def _collect(self, now: float) -> None:
        while self._returned:
            slab = self._returned.popleft()
            slab.idle_since = now
            self._idle.append(slab)
        if self._keep is not None:
            del self._idle[: max(0, len(self._idle) - self._keep)]
        if now:
            for slab in self._idle:
                slab.idle_since = slab.idle_since or now


class Landing:
    """Room for one message, `lead` bytes into an aligned block, so that its tensor is aligned.

    Attributes:
        view: writable, exactly the message's bytes, uninitialized.
        reserved: bytes of memory that it takes from the start; the rest costs when written.
    """

    __slots__ = ("_fresh", "_lead", "reserved", "view")

    def __init__(self, size: int, lead: int, pool: SlabPool, *, recycled: bool) -> None:
        """Raises ProtocolError `out-of-memory` when the system refuses (W2)."""
        self._lead = lead
        self._fresh: Slab | None = None
        try:
            if size < MAPPED_FROM:
                block = np.empty(size + lead, np.uint8).data
                self.reserved = size
            else:
                slab, block, used = pool.take(size + lead, recycled=recycled)
                self.reserved = slab.capacity if used else 0
                self._fresh = None if used else slab
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise ProtocolError(
                ErrorCode.OUT_OF_MEMORY, f"no memory for a message of {size} bytes"
            ) from error
        self.view = block[lead : lead + size]

    def expect(self, start: int, end: int) -> None:
        """Bytes [start, end) are about to land: a long slice in fresh memory gets huge pages.

        One fault then serves 2 MiB instead of 4 KiB. Short slices do not get them, or single bytes
        could take 2 MiB each.
        """
        if self._fresh is not None and end - start >= HUGE:
            self._fresh.advise(start + self._lead, end + self._lead)
