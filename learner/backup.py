"""When the durable local state is saved, and how a process continues from it (L51-L53)."""

from __future__ import annotations

import logging

from learner.events import StateSaved
from learner.shared import Shared
from learner.state import LocalState, StateStore

log = logging.getLogger(__name__)


class Backup:
    """The saves of one learner; does nothing without a state directory."""

    def __init__(
        self,
        shared: Shared,
        local: LocalState,
        store: StateStore | None,
        *,
        alpha: float,
        every_steps: int,
    ) -> None:
        self._shared = shared
        self._local = local
        self._store = store
        self._alpha = alpha
        self._every_steps = every_steps

    def restore(self) -> None:
        """Continue at the newest save that verifies, if there is one (L51).

        Raises:
            StateMismatch, StateUnreadable: see `StateStore.load`.
        """
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return
        with self._shared.gate:
            self._shared.session.resume(saved.local_step, saved.units, saved.anchors)
        self._local.restore(saved)
        log.info("continuing at local step %d from %s", saved.local_step, saved.path)

    def when_due(self) -> None:
        """Every so many steps; never waits for the disk (L53)."""
        if self._store is None or self._shared.session.local_step % self._every_steps:
            return
        if self._store.busy:
            log.info("step %d is not saved: the save before is still being written", self._step)
            return
        self._start(self._store)

    def now(self) -> None:
        """At a stop signal and before finalization: returns when it is on disk (L53)."""
        if self._store is not None:
            self._store.wait()
            self._start(self._store)
            self._store.wait()

    def close(self) -> None:
        """Finish the save that is being written."""
        if self._store is not None:
            self._store.close()

    @property
    def _step(self) -> int:
        return self._shared.session.local_step

    def _start(self, store: StateStore) -> None:
        with self._shared.gate:
            session = self._shared.session
            step, units, anchors = session.local_step, session.units, session.anchors
        cut = self._local.snapshot(step, units, anchors, self._alpha)
        store.save(cut, lambda path: self._shared.advance(StateSaved(step, path)))
