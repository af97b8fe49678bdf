"""The worker threads of the syncer, one small pool per kind of work (C1, C30, W48).

Kinds never wait for each other: a merge of a gigabyte delays neither an fsync nor a finite scan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Pools by kind of work.

    Attributes:
        merge: rounds; several may compute at once (C30).
        encode: broadcasts, the final cut, the INIT set.
        wire: finite scans of what connection groups receive.
        hello: large HELLOs, so that strangers who send them delay no learner.
        disk: checkpoints, marker and final-state, strictly in order (C32).
        tape: event records, in order.
        drain: waits for the SVD pool.
    """

    def __init__(self, merges: int = 2) -> None:
        self.merge = ThreadPoolExecutor(merges, "merge")
        self.encode = ThreadPoolExecutor(1, "encode")
        self.wire = ThreadPoolExecutor(2, "wire")
        self.hello = ThreadPoolExecutor(1, "hello")
        self.disk = ThreadPoolExecutor(1, "disk")
        self.tape = ThreadPoolExecutor(1, "tape")
        self.drain = ThreadPoolExecutor(1, "drain")

    def shutdown(self) -> None:
        """Drop what has not begun and return; what runs on ends by itself."""
        pools = (self.merge, self.encode, self.wire, self.hello, self.disk, self.tape, self.drain)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call something on the loop, from any thread; nothing when the loop is closed already."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        if not loop.is_closed():  # else the process ends: nobody waits for this any more
            raise


def submit(
    loop: asyncio.AbstractEventLoop,
    pool: ThreadPoolExecutor,
    job: Callable[[], T],
    done: Callable[[Future[T]], None],
) -> None:
    """Run `job` in `pool`, then `done` on the loop with its finished future."""

    def finished(future: Future[T]) -> None:
        if not future.cancelled():
            call_in(loop, done, future)

    pool.submit(job).add_done_callback(finished)
