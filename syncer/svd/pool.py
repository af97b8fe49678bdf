"""The exact-SVD pool behind `--iso-backend torch-svd` (numerics.md section 9).

One thread per worker process takes matrices from one queue, in order of submission. Callers wait
with deadlines; whoever sees the first fault poisons the pool for ever: all workers are killed,
which also ends every blocked read and write, and all waiters fail with that first message (N33).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from syncer.svd.child import Child, ChildCommand, ChildFailed

Floats = NDArray[np.float32]


PROBE = np.ones((1, 1), np.float32)
"""The first request of every worker, which must come back as it is (N30)."""


class PoolPoisoned(Exception):
    """The pool had a fault and is of no more use; the text is its first one (N33)."""


class PoolClosed(Exception):
    """Work was submitted after `drain` or `close`: an error of the caller."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool is built.

    Attributes:
        devices: one worker each, distinct.
        python: interpreter of the workers.
        capacity: matrices queued plus running, at least 1 (N32).
        startup_s: until all workers have answered the probe (N31).
        request_s: from submission to result.
        drain_s: for `drain`.
        rank_cutoff: N13, None for the default.
    """

    devices: tuple[str, ...]
    python: str
    capacity: int
    startup_s: float
    request_s: float
    drain_s: float
    rank_cutoff: float | None = None


@dataclass(slots=True)
class _Job:
    matrix: Floats
    result: Floats | None = None


class SvdPool:
    """A pool; `start` before use, `close` at the end. Every method may be called from any thread.

    Args:
        settings: workers, capacity, deadlines.
        on_poison: called once with the first fault, from any thread; must not block.
    """

    def __init__(
        self, settings: PoolSettings, on_poison: Callable[[str], None] | None = None
    ) -> None:
        self._settings = settings
        self._on_poison = on_poison
        self._changed = threading.Condition()  # guards everything below; its lock is reentrant
        self._queue: deque[_Job] = deque()
        self._admitted = 0  # queued plus running (N32)
        self._outstanding = 0  # admitted, or waiting for capacity
        self._ready = 0
        self._busy: set[str] = set()  # devices whose worker owes an answer
        self._draining = False
        self._closed = False
        self._poison: str | None = None
        self._children: list[Child] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start every worker and wait until all have passed the probe (N30).

        Raises:
            PoolPoisoned: one did not within the startup deadline.
        """
        deadline = time.monotonic() + self._settings.startup_s
        for device in self._settings.devices:
            self._start_child(device)
        late = f"SVD workers did not start within {self._settings.startup_s:g} s"
        with self._changed:
            self._wait(lambda: self._ready == len(self._settings.devices), deadline, late)

    def flatten(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Flatten f32 CPU matrices (N12); blocks until all are done, results in the same order.

        Raises:
            PoolPoisoned: N33.
            PoolClosed: after `drain` or `close`.
        """
        deadline = time.monotonic() + self._settings.request_s
        late = f"SVD request not answered within {self._settings.request_s:g} s"
        jobs = [_Job(matrix.contiguous().numpy()) for matrix in matrices]
        with self._changed:
            if self._draining:
                raise PoolClosed("the SVD pool takes no more work")
            self._outstanding += len(jobs)
            for job in jobs:
                self._wait(lambda: self._admitted < self._settings.capacity, deadline, late)
                self._admitted += 1
                self._queue.append(job)
                self._changed.notify_all()
            missing = list(jobs)
            while missing := [job for job in missing if job.result is None]:
                # What was delivered before a fault stays valid (N33): a fault matters only here.
                self._wait(lambda: missing[0].result is not None, deadline, late)
            return [torch.from_numpy(job.result) for job in jobs]

    def drain(self) -> None:
        """Close admissions for good and wait until nothing is outstanding (N33).

        Raises:
            PoolPoisoned: there was a fault, before or while waiting, or the drain deadline passed.
        """
        deadline = time.monotonic() + self._settings.drain_s
        late = f"SVD pool not drained within {self._settings.drain_s:g} s"
        with self._changed:
            self._draining = True
            self._wait(lambda: self._outstanding == 0, deadline, late)

    def close(self) -> None:
        """Kill all workers and wait for the pool's threads; pending work fails. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for child in self._children:
                child.kill()
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.close_pipes()

    @property
    def poison(self) -> str | None:
        """The first fault, None while there was none."""
        with self._changed:
            return self._poison

    @property
    def admitted(self) -> int:
        """Matrices queued plus running, at most the capacity (N32)."""
        with self._changed:
            return self._admitted

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in the order of the devices."""
        with self._changed:
            return tuple(child.pid for child in self._children)

    # -- under the lock --------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], deadline: float, late: str) -> None:
        """Wait for `condition`; any fault comes first, and lateness is one."""
        while True:
            if self._poison is not None:
                raise PoolPoisoned(self._poison)
            if self._closed:
                raise PoolClosed("the SVD pool is closed")
            if condition():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                self._fail(late)
            else:
                self._changed.wait(left)

    def _fail(self, text: str) -> None:
        """Poison the pool unless it is already, or is being closed."""
        with self._changed:
            if self._poison is not None or self._closed:
                return
            self._poison = text
            self._queue.clear()
            for child in self._children:
                child.kill()
            self._changed.notify_all()
            if self._on_poison is not None:
                self._on_poison(text)

    # -- the pool's threads ----------------------------------------------------------------------

    def _start_child(self, device: str) -> None:
        command = ChildCommand(self._settings.python, device, self._settings.rank_cutoff)
        with self._changed:
            if self._poison is not None:
                return
            try:
                child = Child(command)
            except ChildFailed as failure:
                self._fail(f"SVD worker on {device} {failure}")
                return
            self._children.append(child)
            self._busy.add(device)
            for work in (self._serve, self._watch):
                thread = threading.Thread(
                    target=work, args=(child,), name=f"svd-{device}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, child: Child) -> None:
        """Probe one worker, then feed it from the queue until the pool ends."""
        try:
            if child.exchange(PROBE).tobytes() != PROBE.tobytes():
                raise ChildFailed("did not return the probe bit for bit")
            with self._changed:
                self._ready += 1
                self._busy.discard(child.device)
                self._changed.notify_all()
            while (job := self._next(child)) is not None:
                result = child.exchange(job.matrix)
                with self._changed:
                    self._busy.discard(child.device)
                    if self._poison is None:
                        job.result = result
                        self._admitted -= 1
                        self._outstanding -= 1
                        self._changed.notify_all()
        except (ChildFailed, MemoryError) as failure:
            self._fail(f"SVD worker on {child.device} {failure}")

    def _next(self, child: Child) -> _Job | None:
        with self._changed:
            while not self._queue and self._poison is None and not self._closed:
                self._changed.wait()
            if self._poison is not None or self._closed:
                return None
            self._busy.add(child.device)
            return self._queue.popleft()

    def _watch(self, child: Child) -> None:
        """Notice the end of an idle worker; of a busy one `_serve` knows more."""
        ending = child.wait()
        with self._changed:
            if child.device not in self._busy:
                self._fail(f"SVD worker on {child.device} {ending}")
