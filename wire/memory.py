"""Memory for arriving messages: fresh mappings that cost nothing until bytes land (W6, W32)."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from wire.errors import ErrorCode, ProtocolError

HUGE = 2 * 1024 * 1024
"""Bytes of a huge page; slices at least this long are given them."""
MAPPED_FROM = 256 * 1024
"""Messages from this size on live in a mapping of their own."""

_CAN_ADVISE = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_NOHUGEPAGE")


class Landing:
    """Room for one message, `lead` bytes into an aligned block, so that its tensor is aligned.

    Attributes:
        view: writable, exactly the message's bytes, uninitialized.
        lazy: whether bytes that are never written cost no memory.
    """

    __slots__ = ("_base", "_lead", "_map", "lazy", "view")

    def __init__(self, size: int, lead: int) -> None:
        """Raises ProtocolError `out-of-memory` when the system refuses (W2)."""
        self.lazy = size >= MAPPED_FROM
        self._lead = lead
        self._base = 0
        self._map: mmap.mmap | None = None
        try:
            block = self._mapping(size + lead) if self.lazy else _heap(size + lead)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise ProtocolError(
                ErrorCode.OUT_OF_MEMORY, f"no memory for a message of {size} bytes"
            ) from error
        self.view = block[lead : lead + size]

    def expect(self, start: int, end: int) -> None:
        """Bytes [start, end) are about to land: a long slice gets huge pages.

        One fault then serves 2 MiB instead of 4 KiB, which is what makes fresh memory affordable at
        wire speed. Short slices do not get them, or single bytes could take 2 MiB each.
        """
        if self._map is None or end - start < HUGE:
            return
        first = self._base + (start + self._lead) // HUGE * HUGE
        last = min(self._base - (-(end + self._lead) // HUGE) * HUGE, len(self._map))
        with contextlib.suppress(OSError):  # advice only: without it memory is merely slower
            self._map.madvise(mmap.MADV_HUGEPAGE, first, last - first)

    def _mapping(self, size: int) -> memoryview:
        extra = HUGE if _CAN_ADVISE else 0
        mapping = mmap.mmap(-1, size + extra, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _CAN_ADVISE:
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            self._base = -address % HUGE
            self._map = mapping
        return memoryview(mapping)[self._base : self._base + size]


def _heap(size: int) -> memoryview:
    return np.empty(size, np.uint8).data
