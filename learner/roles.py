"""What a learner does at start, at each boundary, and at the end: one class per role.

`Leading` talks to the syncer. `Following` is every other rank of an island and does what the leader
announces. `Baseline` trains alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from learner.boundary import Boundary
from learner.client import NetworkClient, Transport
from learner.config import Address
from learner.core import Core
from learner.ending import Ending
from learner.errors import ConfigError, SafetyStop
from learner.events import Finalizing, Result, StepInfo
from learner.feedback import Feedback
from learner.initial import build_hello, describe_bad, encode_init
from learner.island import BoundaryEnd, Follower, led
from learner.ranks import Ranks


class Role(Protocol):
    """The steps counted and checked, a role decides what a boundary means."""

    def start(self) -> None:
        """Restore the saved state, get ready; see `Learner.start`."""

    def step(self) -> StepInfo:
        """The optimizer step has been counted; see `Learner.step`."""

    def finish_budget(self) -> None:
        """See `Learner.finish_budget`."""

    def finish(self) -> None:
        """See `Learner.finish`."""

    def wake(self) -> None:
        """A stop was requested; safe in a signal handler."""

    def close(self) -> None:
        """Free what `start` took."""


class Leading:
    """Rank 0 of an island, usually its only one."""

    def __init__(
        self, core: Core, address: Address, transport: Transport | None, ranks: Ranks | None
    ) -> None:
        self._core = core
        self._ranks = ranks
        config = core.config
        feedback = Feedback(
            len(core.layout),
            config.dtype,
            config.alpha,
            # A budget run's pushes are exactly frozen - base (L29, L42).
            enabled=config.error_feedback and config.learner_budget_steps is None,
            buffers=core.buffers,
            in_place=not core.parameters.staged,
        )
        blame = partial(describe_bad, core.parameters, dtype=config.dtype)
        self._client = NetworkClient(
            address,
            build_hello(config, core.layout, core.contract),
            core.shared,
            feedback,
            blame=blame,
            connect_timeout_s=config.connect_timeout_s,
            transport=transport,
            pool=core.buffers.pool,
        )
        self._boundary = Boundary(
            core.shared,
            core.parameters,
            feedback,
            self._client,
            core.buffers,
            alpha=config.alpha,
            blame=blame,
            emit=core.emit,
            saving=lambda: core.backup.busy,
        )
        self._ending = Ending(core.shared, self._client, core.parameters, config.final_timeout_s)

    def start(self) -> None:
        """See `Role`; returns once connected."""
        core = self._core
        core.backup.restore()
        with self._led():
            if core.config.learner_id == 0:
                core.shared.init = encode_init(core.parameters, core.config.dtype)
            self._client.start()
            core.shared.wait_for(lambda: core.shared.session.generation is not None)
            if core.config.sync_every is not None:
                # Blocking mode trains from the global state, not from the seed's.
                self._boundary.await_anchors(core.config.final_timeout_s)
        core.emit_pending()

    def step(self) -> StepInfo:
        """See `Role`: the order of L20."""
        with self._led():
            return self._step()

    def _step(self) -> StepInfo:
        core = self._core
        core.shared.raise_fatal()
        applied: tuple[int, ...] = ()
        pushed: tuple[int, ...] = ()
        if not core.shared.session.finalizing:
            applied, pushed = self._exchange()
            core.stop_if_asked()
        if core.shared.session.finalizing:
            self._finalize()
            return core.info(applied, pushed)
        self._client.boundary()
        core.backup.when_due()
        info = core.info(applied, pushed)
        if core.at_safety_stop and core.config.learner_budget_steps is None:
            raise SafetyStop(
                f"max_local_steps {core.local_step} reached before the syncer ended the run"
            )
        return info

    def _exchange(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Apply and answer; in blocking mode only every so many steps, and then to the end."""
        core = self._core
        every = core.config.sync_every
        if every is None:
            applied = self._boundary.apply_broadcasts()
            # A stop leaves the PULLs to those who stay.
            stopping = core.shared.stop_requested
            return applied, () if stopping else self._boundary.answer_pulls()
        if core.local_step % every:
            return (), ()
        return self._boundary.synchronise(core.config.final_timeout_s)

    def finish_budget(self) -> None:
        """See `Role`: report, answer, finalize."""
        with self._led():
            self._ending.report(self._core.local_step)
            self._ending.consolidate(self._boundary.answer_pulls)
            self._finalize()

    def _finalize(self) -> None:
        core = self._core
        core.emit(Finalizing(self._ending.announce()))
        core.backup.now()
        manifest = self._ending.apply_cut()
        core.end(manifest.step, manifest.versions)
        core.emit_pending()

    def finish(self) -> None:
        """See `Role`: wait for SHUTDOWN."""
        if self._core.result is not None:
            with self._led():
                self._ending.await_shutdown(self._core.result.step)
            self._core.emit_pending()

    def wake(self) -> None:
        """See `Role`."""
        self._client.wake()

    def close(self) -> None:
        """See `Role`."""
        self._client.close()

    @contextmanager
    def _led(self) -> Iterator[None]:
        if self._ranks is None:
            yield
            return
        with led(self._ranks, self._result):
            yield

    def _result(self) -> Result | None:
        return self._core.result


class Following:
    """A rank that does not talk to the syncer."""

    def __init__(self, core: Core, ranks: Ranks) -> None:
        self._core = core
        self._follower = Follower(ranks, core.parameters, core.config.alpha, core.backup.save)

    def start(self) -> None:
        """See `Role`; returns once the leader is connected."""
        self._core.backup.restore()
        self._follow()

    def step(self) -> StepInfo:
        """See `Role`."""
        return self._core.info(self._follow().applied)

    def finish_budget(self) -> None:
        """See `Role`."""
        self._follow()

    def finish(self) -> None:
        """See `Role`."""
        self._follow()

    def wake(self) -> None:
        """A stop is the leader's to announce; torchrun signals every rank."""

    def close(self) -> None:
        """See `Role`."""

    def _follow(self) -> BoundaryEnd:
        end = self._follower.follow()
        if end.versions is not None and self._core.result is None:
            self._core.end(end.step, end.versions)
        self._core.emit_pending()
        return end


class Baseline:
    """`connect="none"`: no synchronisation, `step` only counts (L70)."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def start(self) -> None:
        """See `Role`."""
        self._core.backup.restore()

    def step(self) -> StepInfo:
        """See `Role`."""
        core = self._core
        core.stop_if_asked()
        core.backup.when_due()
        core.emit_pending()
        return StepInfo(local_step=core.local_step, stop=core.at_safety_stop)

    def finish_budget(self) -> None:
        """See `Role`."""
        raise ConfigError("a budget run needs a syncer")

    def finish(self) -> None:
        """See `Role`."""

    def wake(self) -> None:
        """See `Role`."""

    def close(self) -> None:
        """See `Role`."""
