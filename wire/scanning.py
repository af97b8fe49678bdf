"""Finds NaN, infinities and bad q4 scales in tensors while they still arrive (W11, W48).

A message is scanned in worker threads, in order, as its bytes land without a gap, so that little
is left to do when the last one comes. Verdicts wait for completion: only then does W11 apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from wire.chunks import Partial
from wire.connection import tensor_region
from wire.dtypes import Q4_BLOCK_BYTES, DType
from wire.errors import ProtocolError
from wire.limits import Session
from wire.tensors import check_finite

INLINE_BYTES = 256 * 1024
"""Tensors up to this size are scanned on the loop: a thread would take longer."""
STEP_BYTES = 4 * 1024 * 1024
"""What must have landed before another piece of an unfinished message is scanned."""

_UNIT = {DType.F32: 4, DType.BF16: 2, DType.Q4: Q4_BLOCK_BYTES}

Verdict = Callable[[ProtocolError | None], None]


class Scanner:
    """All scans of one group."""

    def __init__(self, session: Session, executor: Executor) -> None:
        self._session = session
        self._executor = executor
        self._scans: dict[Partial, _Scan] = {}

    def progress(self, partial: Partial) -> None:
        """More of an unfinished message has landed."""
        if partial.total <= INLINE_BYTES:
            return
        scan = self._scans.get(partial)
        if scan is None:
            region = tensor_region(self._session, partial)
            if region is None:
                return
            dtype, start = region
            scan = _Scan(self._executor, partial.view[start:], dtype, start)
            self._scans[partial] = scan
        scan.landed(partial.prefix)

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
        if scan is None:
            if tensor.nbytes <= INLINE_BYTES:
                check_finite(tensor, dtype)
                return True
            scan = _Scan(self._executor, tensor, dtype, 0)
        return scan.finish(verdict)

    def clear(self) -> None:
        """Forget unfinished messages (W34)."""
        self._scans.clear()


class _Scan:
    """One tensor; at most one piece of it is with a worker at a time."""

    def __init__(self, executor: Executor, tensor: memoryview, dtype: DType, start: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._tensor = tensor
        self._dtype = dtype
        self._start = start
        self._landed = 0
        self._scanned = 0
        self._running = False
        self._error: ProtocolError | None = None
        self._verdict: Verdict | None = None

    def landed(self, prefix: int) -> None:
        """The inner frame is complete up to `prefix`."""
        unit = _UNIT[self._dtype]
        self._landed = max(0, prefix - self._start) // unit * unit
        if self._landed - self._scanned >= STEP_BYTES:
            self._next()

    def finish(self, verdict: Verdict) -> bool:
        """All of it has landed; see `Scanner.complete`."""
        self._landed = self._tensor.nbytes
        if not self._running and self._scanned == self._landed:
            if self._error is not None:
                raise self._error
            return True
        self._verdict = verdict
        self._next()
        return False

    def _next(self) -> None:
        if self._running or self._error is not None:
            return
        piece = self._tensor[self._scanned : self._landed]
        self._scanned = self._landed
        self._running = True
        future = self._loop.run_in_executor(self._executor, check_finite, piece, self._dtype)
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[None]) -> None:
        self._running = False
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, ProtocolError):
            raise error
        self._error = error
        if self._verdict is None:
            if self._landed - self._scanned >= STEP_BYTES:
                self._next()
        elif error is not None or self._scanned == self._landed:
            self._verdict(error)
        else:
            self._next()
