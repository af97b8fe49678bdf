"""What every role of a learner needs: settings, layout, parameters, session, reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from learner.backup import Backup
from learner.buffers import Buffers
from learner.config import LearnerConfig
from learner.events import Event, Result, StepInfo
from learner.parameters import Parameters
from learner.shared import Shared
from wire.layout import NamedLayout


@dataclass
class Core:
    """The common parts of one learner.

    Attributes:
        config: the settings.
        layout: fragments of the model.
        contract: session contract, 32 bytes (W21).
        parameters: the trainables in layout order.
        buffers: memory for whole fragments.
        shared: session, lock and reports.
        backup: durable local state.
        on_event: the user's callback, called on the training thread only.
        result: the end of the run, once it is there.
    """

    config: LearnerConfig
    layout: NamedLayout
    contract: bytes
    parameters: Parameters
    buffers: Buffers
    shared: Shared
    backup: Backup
    on_event: Callable[[Event], None] | None
    result: Result | None = None

    @property
    def local_step(self) -> int:
        """Optimizer steps so far."""
        return self.shared.session.local_step

    def end(self, step: int, versions: tuple[int, ...]) -> Result:
        """The cut of `step` is applied and acknowledged."""
        self.result = Result(
            step=step,
            versions=versions,
            fingerprint=self.layout.fingerprint.hex(),
            contract=self.contract.hex(),
            learner_id=self.config.learner_id,
            local_step=self.local_step,
            acknowledged=True,
        )
        return self.result

    def info(self, applied: tuple[int, ...] = (), pushed: tuple[int, ...] = ()) -> StepInfo:
        """The answer of a step boundary; what it knows of the network is reported first."""
        with self.shared.gate:
            session = self.shared.session
            self.shared.counters.pending_pulls = session.pending_pulls
            self.shared.counters.stale_steps = session.stale_steps
            info = StepInfo(
                local_step=session.local_step,
                applied=applied,
                pushed=pushed,
                pending_pulls=session.pending_pulls,
                connected=session.generation is not None,
                finalizing=session.finalizing,
                stop=self.result is not None,
            )
            events = self._take_events()
        self._emit_all(events)
        return info

    def emit(self, event: Event) -> None:
        """Report now."""
        if self.on_event is not None:
            self.on_event(event)

    def emit_pending(self) -> None:
        """Report what the network thread noted."""
        with self.shared.gate:
            events = self._take_events()
        self._emit_all(events)

    def _take_events(self) -> list[Event]:
        events = list(self.shared.events)
        self.shared.events.clear()
        return events

    def _emit_all(self, events: list[Event]) -> None:
        for event in events:
            self.emit(event)

    def stop_if_asked(self) -> None:
        """Save and raise Interrupted when a stop was requested (L54)."""
        if self.shared.stop_requested:
            self.backup.now()
            self.shared.check()

    @property
    def at_safety_stop(self) -> bool:
        """`max_local_steps` is reached."""
        limit = self.config.max_local_steps
        return limit is not None and self.local_step >= limit
