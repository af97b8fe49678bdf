"""Which bytes of a message have arrived: disjoint ranges with logarithmic checks (W29, W33)."""

from __future__ import annotations

from bisect import bisect_right

from wire.memory import HUGE

PAGE = 4096
RANGE_COST = 128
"""Bytes of bookkeeping charged for one range."""
_BUCKET = 512


class RangeSet:
    """Disjoint half-open ranges of one message; neighbours that touch are one range.

    Ranges lie sorted in buckets of at most 512, so that a check costs two binary searches and an
    insertion moves one bucket, however many ranges a hostile sender makes (W33).

    Attributes:
        touched: bytes of memory that the ranges cost at most: whole pages and bookkeeping.
    """

    __slots__ = ("_ends", "_first", "_starts", "touched")

    def __init__(self) -> None:
        self.touched = 0
        self._first: list[int] = []
        self._starts: list[list[int]] = []
        self._ends: list[list[int]] = []

    @property
    def prefix(self) -> int:
        """Bytes covered from 0 on without a gap."""
        if self._first and self._first[0] == 0:
            return self._ends[0][0]
        return 0

    def __len__(self) -> int:
        return sum(map(len, self._starts))

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any byte of [start, end) is covered."""
        bucket, at = self._find(start)
        if bucket >= 0 and self._ends[bucket][at] > start:
            return True
        following = self._start_after(bucket, at)
        return following is not None and following < end

    def add(self, start: int, end: int) -> None:
        """Cover [start, end), which must not overlap what is covered."""
        bucket, at = self._find(start)
        joins_left = bucket >= 0 and self._ends[bucket][at] == start
        following = self._start_after(bucket, at)
        if following == end:
            start_bucket, start_at = self._find(end)
            end = self._ends[start_bucket][start_at]
            self._remove(start_bucket, start_at)
        if joins_left:
            start = self._starts[bucket][at]
            self.touched -= _cost(start, self._ends[bucket][at])
            self._ends[bucket][at] = end
        else:
            self._insert(bucket, at + 1, start, end)
        self.touched += _cost(start, end)

    def _find(self, start: int) -> tuple[int, int]:
        """Bucket and place of the last range that begins at or before `start`, or (-1, -1)."""
        bucket = bisect_right(self._first, start) - 1
        if bucket < 0:
            return -1, -1
        return bucket, bisect_right(self._starts[bucket], start) - 1

    def _start_after(self, bucket: int, at: int) -> int | None:
        if bucket >= 0 and at + 1 < len(self._starts[bucket]):
            return self._starts[bucket][at + 1]
        return self._first[bucket + 1] if bucket + 1 < len(self._first) else None

    def _remove(self, bucket: int, at: int) -> None:
        starts, ends = self._starts[bucket], self._ends[bucket]
        self.touched -= _cost(starts.pop(at), ends.pop(at))
        if not starts:
            del self._first[bucket], self._starts[bucket], self._ends[bucket]
        elif at == 0:
            self._first[bucket] = starts[0]

    def _insert(self, bucket: int, at: int, start: int, end: int) -> None:
        if bucket < 0:
            bucket = 0
            if not self._first:
                self._first, self._starts, self._ends = [start], [[start]], [[end]]
                return
        starts, ends = self._starts[bucket], self._ends[bucket]
        starts.insert(at, start)
        ends.insert(at, end)
        self._first[bucket] = starts[0]
        if len(starts) > _BUCKET:
            half = _BUCKET // 2
            self._starts.insert(bucket + 1, starts[half:])
            self._ends.insert(bucket + 1, ends[half:])
            self._first.insert(bucket + 1, starts[half])
            del starts[half:], ends[half:]


def _cost(start: int, end: int) -> int:
    page = HUGE if end - start >= HUGE else PAGE
    return (-(-end // page) - start // page) * page + RANGE_COST
