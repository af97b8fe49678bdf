"""Finds NaN, infinities and bad q4 scales in tensors while they still arrive (W11, W48).

A short piece that has just landed is in the processor's cache: looking at it then and there costs
less than telling a thread. Long pieces, which come when the loop is behind, go to worker threads.
Verdicts wait for completion: only then does W11 apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from wire.chunks import Partial, Slice
from wire.connection import tensor_region
from wire.dtypes import Q4_BLOCK_BYTES, DType
from wire.errors import ProtocolError
from wire.limits import Session
from wire.tensors import check_finite, load_loops

INLINE_BYTES = 256 * 1024
"""Tensors up to this size are scanned at once, whole; a thread would take longer."""
HOT_BYTES = 8 * 1024 * 1024
"""Pieces of larger tensors up to this size are scanned as they land, at most some 200 microseconds
each: a slice is in the cache of the processor that received it, and longer ones are rare."""

_UNIT = {DType.F32: 4, DType.BF16: 2, DType.Q4: Q4_BLOCK_BYTES}

Verdict = Callable[[ProtocolError | None], None]
Ranges = Sequence[tuple[int, int]]


class Scanner:
    """All scans of one group."""

    def __init__(self, session: Session, executor: Executor) -> None:
        self._session = session
        self._executor = executor
        self._scans: dict[Partial, _Scan] = {}
        executor.submit(load_loops)

    def progress(self, piece: Slice) -> None:
        """More of a slice of an unfinished message has landed."""
        partial = piece.partial
        if partial.total <= INLINE_BYTES:
            return
        scan = self._scans.get(partial)
        if scan is None:
            scan = self._scans[partial] = _Scan(self._executor)
        if not scan.placed:
            region = tensor_region(self._session, partial)
            if region is not None:
                dtype, start = region
                scan.place(partial.view[start:], dtype, start)
        scan.landed(piece)

    def complete(
        self, source: Partial | None, tensor: memoryview, dtype: DType, verdict: Verdict
    ) -> bool:
        """A whole tensor is there.

        Returns:
            True when it is finite already; false when `verdict` will be called from the loop.

        Raises:
            ProtocolError: `non-finite`, found at once.
        """
        scan = self._scans.pop(source, None) if source is not None else None
        if scan is None or source is None:
            check_finite(tensor, dtype)
            return True
        scan.place(tensor, dtype, source.total - tensor.nbytes)
        return scan.finish(verdict)

    def clear(self) -> None:
        """Forget unfinished messages (W34)."""
        self._scans.clear()


class _Scan:
    """One large tensor. Offsets are those of its inner frame; the tensor begins at `_start`.

    At most one worker is busy with it. What cannot be judged yet, values that two slices share and
    all that lands before the tensor's type is known, waits in `_edges` for completion.
    """

    def __init__(self, executor: Executor) -> None:
        self.placed = False
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._tensor = memoryview(b"")
        self._dtype = DType.F32
        self._start = 0
        self._edges: list[tuple[int, int]] = []
        self._queue: list[tuple[int, int]] = []
        self._running = False
        self._error: ProtocolError | None = None
        self._verdict: Verdict | None = None

    def place(self, tensor: memoryview, dtype: DType, start: int) -> None:
        """Say where the tensor is; until then nothing is scanned."""
        self.placed = True
        self._tensor = tensor.toreadonly()
        self._dtype = dtype
        self._start = start

    def landed(self, piece: Slice) -> None:
        """`piece` is filled further."""
        begin, end = piece.scanned, piece.start + piece.filled
        whole = piece.filled == len(piece.view)
        if not self.placed:
            if whole:
                self._edges.append((begin, end))
            return
        first, last = self._inner(begin, end)
        if first >= last:
            if whole:
                self._edges.append((begin, end))
            return
        if begin < first:
            self._edges.append((begin, first))
        if whole and last < end:
            self._edges.append((last, end))
        piece.scanned = last
        self._look_at(first - self._start, last - self._start)

    def finish(self, verdict: Verdict) -> bool:
        """All of it has landed; see `Scanner.complete`."""
        self._queue += [self._outer(begin, end) for begin, end in self._edges]
        self._edges.clear()
        left = sum(end - begin for begin, end in self._queue)
        if not self._running and left <= INLINE_BYTES:
            if self._error is None:
                _check(self._tensor, self._dtype, self._queue)
                return True
            raise self._error
        self._verdict = verdict
        self._next()
        return False

    def _inner(self, begin: int, end: int) -> tuple[int, int]:
        """The whole values (or q4 blocks) within [begin, end)."""
        unit, start = _UNIT[self._dtype], self._start
        first = max(begin, start)
        return start - (start - first) // unit * unit, start + (end - start) // unit * unit

    def _outer(self, begin: int, end: int) -> tuple[int, int]:
        """The values that [begin, end) has a part of, as tensor bytes."""
        unit, start = _UNIT[self._dtype], self._start
        first = max(0, begin - start) // unit * unit
        return first, max(first, min(self._tensor.nbytes, -((start - end) // unit) * unit))

    def _look_at(self, begin: int, end: int) -> None:
        if self._error is not None:
            return
        if end - begin > HOT_BYTES:
            self._queue.append((begin, end))
            self._next()
            return
        try:
            check_finite(self._tensor[begin:end], self._dtype)
        except ProtocolError as error:
            self._error = error

    def _next(self) -> None:
        if self._running:
            return
        ranges, self._queue = self._queue, []
        self._running = True
        future = self._loop.run_in_executor(
            self._executor, _check, self._tensor, self._dtype, ranges
        )
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[None]) -> None:
        self._running = False
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, ProtocolError):
            raise error
        self._error = self._error or error
        if self._verdict is not None and (self._error is not None or not self._queue):
            self._verdict(self._error)
        elif self._queue:
            self._next()


def _check(tensor: memoryview, dtype: DType, ranges: Ranges) -> None:
    for begin, end in ranges:
        check_finite(tensor[begin:end], dtype)
