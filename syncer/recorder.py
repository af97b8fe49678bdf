"""Feeds the tape from the event loop: in order, in a thread of its own (C40)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from syncer.tape import TapeWriter
from syncer.workers import submit


class TapeFailed(Exception):
    """The tape can't be written, which ends the run (C35)."""


class Recorder:
    """Records handed over on the loop are appended in their order, each with one write call.

    `failed` is told, on the loop, when one can't be written (C35); nothing is written after that.
    """

    def __init__(
        self,
        writer: TapeWriter,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPoolExecutor,
        failed: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._pool = pool
        self._failed = failed
        self._wall_clock = wall_clock
        self._records: deque[Mapping[str, Any]] = deque()
        self._writing = False
        self._broken: Exception | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue one record; its `ts` is now."""
        self._records.append({**record, "ts": self._wall_clock()})
        if not self._writing:
            self._writing = True
            submit(self._loop, self._pool, self._append_all, self._appended)

    def sync(self) -> None:
        """Make everything queued so far durable; blocks, so call it in another thread.

        Raises:
            TapeFailed: a record can't be written.
        """
        self._run(self._append_and_sync)

    def close(self) -> None:
        """Append what is queued, sync and close; blocks. Raises as `sync`."""
        try:
            self.sync()
        finally:
            self._run(self._writer.close)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            self._pool.submit(job).result()
        except (OSError, ValueError) as error:
            raise TapeFailed(self._complaint(error)) from error

    def _append_all(self) -> None:
        """In the tape's thread."""
        if self._broken is not None:
            raise self._broken
        try:
            while self._records:
                self._writer.append(self._records.popleft())
        except (OSError, ValueError) as error:
            self._broken = error
            raise

    def _append_and_sync(self) -> None:
        self._append_all()
        self._writer.sync()

    def _appended(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._failed(self._complaint(error))
        elif self._records:
            submit(self._loop, self._pool, self._append_all, self._appended)
        else:
            self._writing = False

    def _complaint(self, error: BaseException) -> str:
        return f"the event tape {self._writer.path} can't be written: {error}"
