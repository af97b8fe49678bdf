"""The core's commands that take time: each runs in a thread and comes back as an event (C1).

Merges, decoding, the disk and the SVD pool. Every method belongs to the event loop and returns at
once; the event carries the command's ticket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from syncer import commands as c
from syncer import events as e
from syncer.merge.engine import merge_round
from syncer.merge.memory import ResultMemory
from syncer.merge.plan import MergeResult, NonFiniteMerge
from syncer.recorder import Recorder, TapeFailed
from syncer.services import Services
from syncer.warmup import warm_up
from syncer.workers import Workers, submit
from wire.dtypes import DType
from wire.messages import Buffer, Hello
from wire.tensors import decode

T = TypeVar("T")


class Jobs:
    """Runs commands in worker threads.

    Args:
        post: takes the event of each answer, on the loop.
        recorder: the tape, which is synced before a checkpoint takes its name; None without one.
    """

    def __init__(
        self,
        services: Services,
        workers: Workers,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[e.Event], None],
        recorder: Recorder | None,
    ) -> None:
        self._services = services
        self._workers = workers
        self._loop = loop
        self._post = post
        self._recorder = recorder
        self._results = ResultMemory()

    def decode_init(self, command: c.DecodeInit, session: Hello) -> None:
        """The INIT set of a session to f32 (C5)."""
        dtype = session.dtype.bulk
        numels = [fragment.numel for fragment in session.layout.fragments]

        def job() -> tuple[Tensor, ...]:
            return tuple(map(_decoder(dtype), command.tensors, numels))

        self._off_loop(
            self._workers.encode,
            job,
            lambda params: e.InitDecoded(command.ticket, params),
            lambda error: e.Failure(f"the initial parameters can't be decoded: {error}"),
        )

    def warm_up(self, hello: Hello) -> None:
        """While the quorum gathers: so the first round need not wait for compiled code."""
        modes = frozenset(fragment.mode for fragment in hello.layout.fragments)
        self._workers.merge.submit(warm_up, hello.dtype, modes, self._services.heloco)

    def start_merge(self, command: c.StartMerge) -> None:
        """One round in the merge pool; a refused one is an answer too (C34)."""

        def job() -> tuple[MergeResult, float]:
            start = time.perf_counter()
            result = merge_round(command.job, self._services.svd, memory=self._results)
            return result, time.perf_counter() - start

        def failed(error: BaseException) -> e.Event:
            if isinstance(error, NonFiniteMerge):
                return e.MergeRefused(command.ticket, error.largest)
            return e.Failure(f"a merge failed: {_reason(error)}")

        self._off_loop(
            self._workers.merge, job, lambda made: e.MergeDone(command.ticket, *made), failed
        )

    def drain_pool(self, command: c.DrainPool) -> None:
        """Wait for the SVD pool (N33)."""
        drain = self._services.drain_svd
        if drain is None:
            self._post(e.TaskDone(command.ticket))
            return
        self._task(self._workers.drain, command.ticket, drain, "the SVD pool can't be drained")

    def save_checkpoint(self, command: c.SaveCheckpoint) -> None:
        """Make one cut durable (C32, C35)."""
        recorder = self._recorder

        def job() -> None:
            self._services.store.save(
                command.snapshot,
                patch=command.patch,
                last=command.last,
                before_publish=None if recorder is None else recorder.sync,  # C40
            )

        def failed(error: BaseException) -> e.Event:
            if isinstance(error, TapeFailed):  # no retry helps (C35)
                return e.Failure(str(error))
            return e.SaveFailed(command.ticket, _reason(error))

        self._off_loop(self._workers.disk, job, lambda _: e.SaveDone(command.ticket), failed)

    def write_final_state(self, command: c.WriteFinalState) -> None:
        """Write `--final-state` (K23)."""
        write = self._services.write_final_state
        if write is None:
            raise RuntimeError("a final state was ordered without --final-state")
        self._task(
            self._workers.disk,
            command.ticket,
            lambda: write(command.snapshot),
            "--final-state can't be written",
        )

    def write_marker(self, command: c.WriteMarker) -> None:
        """Declare the checkpoint final (K20)."""
        self._task(
            self._workers.disk,
            command.ticket,
            lambda: self._services.store.write_marker(command.step),
            "the final marker can't be written",
        )

    def remove_marker(self, command: c.RemoveMarker) -> None:
        """Remove a stale declaration (K22)."""
        self._task(
            self._workers.disk,
            command.ticket,
            self._services.store.remove_marker,
            "the stale final marker can't be removed",
        )

    def _task(
        self, pool: ThreadPoolExecutor, ticket: int, job: Callable[[], None], complaint: str
    ) -> None:
        self._off_loop(
            pool,
            job,
            lambda _: e.TaskDone(ticket),
            lambda error: e.Failure(f"{complaint}: {_reason(error)}"),
        )

    def _off_loop(
        self,
        pool: ThreadPoolExecutor,
        job: Callable[[], T],
        done: Callable[[T], e.Event],
        failed: Callable[[BaseException], e.Event],
    ) -> None:
        def answer(future: Future[T]) -> None:
            error = future.exception()
            self._post(done(future.result()) if error is None else failed(error))

        submit(self._loop, pool, job, answer)


def _decoder(dtype: DType) -> Callable[[Buffer, int], Tensor]:
    return lambda data, numel: decode(data, dtype, numel)


def _reason(error: BaseException) -> str:
    """One line for people: the text of an error, or its kind when it has none."""
    return str(error) or type(error).__name__
