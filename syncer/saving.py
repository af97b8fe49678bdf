"""One checkpoint write at a time, tried again while the disk refuses (C32, C35).

At most one write is with the actor and at most one job waits; a newer cut takes the place of a
waiting or failed older one, because both would become the same file. Nothing here grows with the
length of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkpoint.snapshot import Snapshot
from syncer.commands import SaveCheckpoint, SaveKind
from syncer.context import Context
from syncer.events import SaveDone, SaveFailed

RETRY_CAP = 30.0
"""Longest pause between two tries of a failed write, seconds (C35)."""

Done = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One cut to make durable.

    Attributes:
        kind: full, patched, last (K11, K12, K14).
        snapshot: the cut.
        done: called with the time when it is durable.
        on_failure: called with the reason after the first failure, instead of trying again.
    """

    kind: SaveKind
    snapshot: Snapshot
    done: Done | None = None
    on_failure: Callable[[str], None] | None = None


class Saver:
    """The queue of checkpoint writes: one running, one waiting."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._running: SaveJob | None = None
        self._waiting: SaveJob | None = None
        self._failed: SaveJob | None = None
        self._failures = 0
        self._failing_since = 0.0
        self._retry_at = 0.0

    @property
    def failing(self) -> bool:
        """The last try failed: commits and broadcasts are withheld (C35)."""
        return self._failures > 0

    @property
    def deadline(self) -> float | None:
        """When the next try is due, or when it is given up."""
        return None if self._failed is None else min(self._retry_at, self._give_up_at)

    def submit(self, job: SaveJob) -> None:
        """Write this cut, after a running write, instead of a waiting or failed one."""
        if self._running is not None:
            self._waiting = job
            return
        self._failed = None
        self._start(job)

    def tick(self, now: float) -> None:
        """Try a failed write again, or give up (C35)."""
        job = self._failed
        if job is None:
            return
        if now >= self._give_up_at:
            self._failed = None
            self._ctx.fail(
                f"the checkpoint of step {job.snapshot.global_step} could not be written for "
                f"{self._ctx.config.quorum_timeout:g} s, {self._failures} tries; "
                "the file at the path is intact"
            )
        elif now >= self._retry_at:
            self._failed = None
            self._start(job)

    @property
    def _give_up_at(self) -> float:
        return self._failing_since + self._ctx.config.quorum_timeout

    def _start(self, job: SaveJob) -> None:
        self._running = job
        attempt = self._failures + 1
        self._ctx.ask(
            lambda ticket: SaveCheckpoint(ticket, job.kind, job.snapshot, attempt), self._answered
        )

    def _answered(self, event: SaveDone | SaveFailed, now: float) -> None:
        job, self._running = self._running, None
        waiting, self._waiting = self._waiting, None
        if job is None:
            raise AssertionError("an answer to a checkpoint write that never began")
        if isinstance(event, SaveFailed):
            self._write_failed(job, waiting, event.reason, now)
            return
        if self._failures:
            self._ctx.log("info", f"the checkpoint is written again after {self._failures} tries")
        self._failures = 0
        if job.done is not None:
            job.done(now)
        if waiting is not None:
            self.submit(waiting)

    def _write_failed(self, job: SaveJob, waiting: SaveJob | None, reason: str, now: float) -> None:
        if job.on_failure is not None:
            job.on_failure(reason)
            return
        if self._failures == 0:
            self._failing_since = now
        pause = min(2.0**self._failures, RETRY_CAP)
        self._failures += 1
        self._retry_at = now + pause
        self._ctx.log(
            "error",
            f"checkpoint of step {job.snapshot.global_step} not written: {reason}; commits wait. "
            f"Free space or repair the disk: next try in {pause:g} s, "
            f"given up in {max(0.0, self._give_up_at - now):g} s",
        )
        if waiting is not None and waiting.on_failure is not None:
            self._start(waiting)
        else:
            self._failed = waiting or job
