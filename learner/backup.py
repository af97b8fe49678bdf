"""When the durable local state is saved, and how a process continues from it (L51-L53)."""

from __future__ import annotations

import logging

from learner.errors import StateMismatch
from learner.events import StateSaved
from learner.ranks import Operation, Ranks
from learner.shared import Shared
from learner.state import KEPT, LocalState, Saved, StateStore

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
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            shared, local, store: where the state is, and where it goes.
            alpha: noted in the save.
            every_steps: optimizer steps between two saves.
            ranks: of a several-rank island; its leader says when all of them save.
        """
        self._shared = shared
        self._local = local
        self._store = store
        self._alpha = alpha
        self._every_steps = every_steps
        self._ranks = ranks

    def restore(self) -> None:
        """Continue at the newest save that verifies, if there is one (L51).

        Raises:
            StateMismatch, StateUnreadable: see `StateStore.load`.
        """
        if self._store is None:
            return
        saved = (
            self._store.load() if self._ranks is None else _load_common(self._store, self._ranks)
        )
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
        self.save(wait=False)

    def now(self) -> None:
        """At a stop signal and before finalization: returns when it is on disk (L53)."""
        self.save(wait=True)

    def save(self, wait: bool) -> None:
        """Take a snapshot and write it; `wait` for the disk."""
        if self._store is None:
            return
        if self._ranks is not None and self._ranks.leading:
            self._ranks.announce(Operation.SAVE, wait)
        self._start(self._store)
        if wait:
            self._store.wait()

    @property
    def busy(self) -> bool:
        """A save is being written: what it shares with the training must not change."""
        return self._store is not None and self._store.busy

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


def _load_common(store: StateStore, ranks: Ranks) -> Saved | None:
    """The newest step that verifies on every rank."""
    steps = ranks.common(store.steps(), KEPT + 1)
    for step in reversed(steps):
        mismatch: StateMismatch | None = None
        saved: Saved | None = None
        try:
            saved = store.load_step(step)
        except StateMismatch as error:
            mismatch = error
        # 0 is another learner's state, 1 does not verify, 2 is good; the worst rank counts.
        worst = ranks.least(0 if mismatch else 1 + (saved is not None))
        if worst == 0:
            raise mismatch or StateMismatch("another rank's state is another learner's")
        if worst == 2:
            return saved
    if ranks.least(not store.steps()):
        return None
    raise store.unreadable()
