"""Everything between the command line and the listener, in the order of C4.

Each refusal is a `StartRefused` with one line that says the way out (exit 2), and undoes what it
had opened.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from checkpoint.errors import CheckpointRefused
from checkpoint.marker import write_final_state
from checkpoint.resume import ResumeFile
from checkpoint.snapshot import Snapshot
from checkpoint.store import CheckpointStore
from syncer.config import CoordinatorConfig
from syncer.merge.plan import SvdBackend
from syncer.options import SyncerOptions, WorkerTimeouts
from syncer.protection import Protection, protect
from syncer.svd.pool import PoolPoisoned, PoolSettings, SvdPool
from syncer.svd.scalar import ScalarSvd
from syncer.tape import TapeError, TapeWriter
from wire.security import SecurityRefused

SPARE_DESCRIPTORS = 64
"""Descriptors kept beside the sockets: files, pipes, libraries."""


class StartRefused(Exception):
    """The start is refused (exit 2); the text is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What people are told about a resume.

    Attributes:
        step: of the checkpoint.
        verified: whether its digests were checked (K15).
        tape_step: step of the last commit record that the tape holds.
    """

    step: int
    verified: bool
    tape_step: int | None


@dataclass(slots=True)
class Launched:
    """What a run owns once its start was not refused.

    Attributes:
        profile: syncer profile hash, 32 bytes.
        resumption: None for a fresh run.
        drain_svd: waits for the SVD pool and ends it, None without one.
        alarm: tells of a fault of the pool.
        protection: keys and certificates.
        cleanup: gives everything back, in reverse order.
    """

    options: SyncerOptions
    profile: bytes
    store: CheckpointStore
    resumption: Resumption | None
    svd: SvdBackend
    drain_svd: Callable[[], None] | None
    alarm: PoolAlarm
    tape: TapeWriter | None
    protection: Protection
    cleanup: contextlib.ExitStack
    _resumed: ResumeFile | None

    def take_resumed(self) -> ResumeFile | None:
        """The checkpoint to go on from, once: whoever takes it decides how long it stays (C87)."""
        resumed, self._resumed = self._resumed, None
        return resumed

    @property
    def write_final_state(self) -> Callable[[Snapshot], None] | None:
        """Writes `--final-state`, None when it is off (K23)."""
        path = self.options.final_state
        return None if path is None else partial(write_final_state, Path(path))


def launch(options: SyncerOptions, timeouts: WorkerTimeouts) -> Launched:
    """Keys, lock, presence, load, SVD pool, tape (C4). Blocks; the caller closes `cleanup`.

    Raises:
        StartRefused: nothing was changed on disk but what K9, C43 and C70 name.
    """
    try:
        protection = protect(options, os.environ)
    except SecurityRefused as error:
        raise StartRefused(str(error)) from error
    with contextlib.ExitStack() as undo:
        store = CheckpointStore(options.checkpoint_path)
        try:
            resumed = _open_store(store, options, undo)
        except CheckpointRefused as error:
            raise StartRefused(str(error)) from error
        _check_outputs(options)
        alarm = PoolAlarm()
        svd, drain_svd = _start_svd(options, timeouts, alarm, undo)
        tape = _open_tape(options)
        tape_step = None
        if tape is not None:
            undo.callback(tape.abandon)
            tape_step = _position_tape(tape, resumed)
        return Launched(
            options=options,
            profile=options.profile.digest(),
            store=store,
            resumption=(
                None
                if resumed is None
                else Resumption(resumed.global_step, resumed.verified, tape_step)
            ),
            svd=svd,
            drain_svd=drain_svd,
            alarm=alarm,
            tape=tape,
            protection=protection,
            cleanup=undo.pop_all(),
            _resumed=resumed,
        )


def _open_store(
    store: CheckpointStore, options: SyncerOptions, undo: contextlib.ExitStack
) -> ResumeFile | None:
    store.acquire()
    undo.callback(store.release)
    store.check_presence(options.resume)
    resumed = None
    if options.resume:
        resumed = store.load(options.profile.iso_backend, options.total_steps)
    store.clean_leftovers()
    if options.learner_budget_steps is not None:
        try:
            store.remove_marker()  # C70
        except OSError as error:
            raise StartRefused(f"a stale final marker can't be removed: {error}") from error
    return resumed


class PoolAlarm:
    """Carries a fault of the SVD pool, from any thread, to the run once there is one (N34)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fault: str | None = None
        self._tell: Callable[[str], None] | None = None

    def ring(self, fault: str) -> None:
        """The pool is poisoned."""
        with self._lock:
            self._fault = fault
            tell = self._tell
        if tell is not None:
            tell(fault)

    def connect(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with a fault, at once if there was one; `tell` is safe in any thread."""
        with self._lock:
            self._tell = tell
            fault = self._fault
        if fault is not None:
            tell(fault)


def _start_svd(
    options: SyncerOptions, timeouts: WorkerTimeouts, alarm: PoolAlarm, undo: contextlib.ExitStack
) -> tuple[SvdBackend, Callable[[], None] | None]:
    """The pool's children are up before the listener is (N28)."""
    if options.iso_backend == "scalar":
        return ScalarSvd(options.iso_rank_cutoff), None
    settings = PoolSettings(
        devices=options.iso_worker_devices,
        python=options.iso_worker_python or sys.executable,
        capacity=options.iso_worker_queue_capacity,
        startup_s=timeouts.startup,
        request_s=timeouts.request,
        drain_s=timeouts.drain,
        rank_cutoff=options.iso_rank_cutoff,
    )
    pool = SvdPool(settings, alarm.ring)
    undo.callback(pool.close)
    try:
        pool.start()
    except PoolPoisoned as error:
        raise StartRefused(
            f"{error}; check --iso-worker-python and --iso-worker-devices"
        ) from error

    def drain() -> None:
        """Nothing is asked of the pool after a drain, so its end is no fault any more."""
        pool.drain()
        pool.close()

    return pool, drain


def _check_outputs(options: SyncerOptions) -> None:
    """One is written after all else, one at the end of the run: too late to learn that it can't."""
    for flag, path in (
        ("--ready-file", options.ready_file),
        ("--final-state", options.final_state),
    ):
        if path is None:
            continue
        directory = os.path.dirname(os.path.abspath(path))
        if not os.access(directory, os.W_OK | os.X_OK) or os.path.isdir(path):
            raise StartRefused(
                f"{flag} {path} can't be written: give a file name in a directory that exists and "
                "is writable"
            )


def _open_tape(options: SyncerOptions) -> TapeWriter | None:
    if options.event_tape is None:
        return None
    try:
        return TapeWriter(options.event_tape)
    except TapeError as error:
        raise StartRefused(f"--event-tape {error}; give a file that can be written") from error


def _position_tape(tape: TapeWriter, resumed: ResumeFile | None) -> int | None:
    try:
        if resumed is not None:
            return tape.resume(resumed.global_step)
        tape.fresh()
    except OSError as error:
        raise StartRefused(f"--event-tape {tape.path}: {error}") from error
    return None


def coordinator_config(options: SyncerOptions) -> CoordinatorConfig:
    """The options the coordinator core needs, durations in seconds."""
    return CoordinatorConfig(
        profile=options.profile.digest(),
        learners=options.learners,
        quorum=options.quorum,
        grace_cap=options.grace_ms / 1000,
        grace_gamma=options.grace_gamma,
        grace_tau=options.grace_tau,
        pipeline=options.pipeline,
        min_round_interval=options.min_round_interval_ms / 1000,
        sync_interval_steps=options.sync_interval_steps,
        quorum_timeout=options.quorum_timeout_s,
        final_ack_timeout=options.final_ack_timeout_s,
        total_steps=options.total_steps,
        checkpoint_every=options.checkpoint_every,
        mark_final=options.mark_final_checkpoint,
        final_state=options.final_state is not None,
        budget_steps=options.learner_budget_steps,
        require_profile=options.require_profile_binding,
        outer_lr=options.outer_lr,
        outer_momentum=options.outer_momentum,
        outer_lr_by_fragment=options.outer_lr_by_fragment,
        heloco=options.delta_correction == "heloco",
        equal_weights=options.learner_weight == "equal",
        iso_backend=options.profile.iso_backend,
        max_base_lag=options.max_base_lag,
        handshake_timeout=options.handshake_timeout_s,
        stall_timeout=options.stall_timeout_s,
    )


def raise_descriptor_limit(connections: int) -> int:
    """Raise the soft limit of open files towards `connections`; returns how many sockets fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_DESCRIPTORS
    limit = soft
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == resource.RLIM_INFINITY:
        return connections
    return min(connections, limit - SPARE_DESCRIPTORS)
