"""What a person or a program sees of a running learner.

Plain terminals and files get a line every few seconds, real terminals a live line at the bottom,
`--log-format json` the same facts as objects (events `progress`, `evaluation`, `final`).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from learner import events
from learner.tasks.base import TrainStep
from wire.cli_support import log_event

LINE_EVERY_S = 3.0

_log = logging.getLogger("learner.progress")


class Progress:
    """Collects what the training loop reports; used as a context manager around it."""

    def __init__(
        self, *, live: bool, alone: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            live: a line at the bottom of a terminal, instead of one every few seconds.
            alone: a baseline, in which there is nothing to say of synchronisation.
            clock: seconds.
        """
        self._alone = alone
        self._clock = clock
        self._live = Live(console=Console(file=sys.stderr), transient=True) if live else None
        self._began = self._line_at = clock()
        self._tokens = 0
        self._losses: list[float] = []
        self._held_out = math.nan

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stepped(self, step: TrainStep, info: events.StepInfo, counters: events.Counters) -> None:
        """After every optimizer step and its boundary."""
        self._tokens += step.tokens
        self._losses.append(step.loss)
        now = self._clock()
        elapsed = now - self._line_at
        if elapsed < LINE_EVERY_S:
            return
        rate = self._tokens / elapsed
        loss = sum(self._losses) / len(self._losses)
        self._line_at, self._tokens = now, 0
        self._losses.clear()
        state = self._sync_state(info)
        line = (
            f"step {info.local_step}: loss {loss:.3f}, held-out {self._held_out:.3f}, "
            f"{rate:,.0f} tokens/s; {state}{self._synced(counters)}"
        )
        if self._live is not None:
            self._live.update(Text(line, style="cyan"))
            return
        log_event(
            _log,
            logging.INFO,
            "progress",
            line,
            local_step=info.local_step,
            loss=round(loss, 5),
            tokens_per_s=round(rate, 1),
            sync=state,
            connected=info.connected,
            pending_pulls=info.pending_pulls,
            **self._totals(counters),
        )

    def evaluated(self, local_step: int, loss: float) -> None:
        """After every held-out evaluation of the model as it is now (nats per byte)."""
        self._held_out = loss
        log_event(
            _log,
            logging.INFO,
            "evaluation",
            f"step {local_step}: held-out loss {loss:.4f} nats per byte",
            local_step=local_step,
            held_out_loss=round(loss, 6),
        )

    def finished(
        self,
        result: events.Result | None,
        local_step: int,
        loss: float,
        counters: events.Counters,
    ) -> None:
        """At the end of a run that ended well; `result` is None for a baseline."""
        what = "baseline" if result is None else f"final model of global step {result.step}"
        log_event(
            _log,
            logging.INFO,
            "final",
            f"{what}: held-out loss {loss:.4f} nats per byte after {local_step} own steps"
            f"{self._synced(counters)}",
            local_step=local_step,
            held_out_loss=round(loss, 6),
            step=None if result is None else result.step,
            acknowledged=None if result is None else result.acknowledged,
            **self._totals(counters),
        )

    def _sync_state(self, info: events.StepInfo) -> str:
        if self._alone:
            return "without sync"
        if info.finalizing:
            return "finalizing"
        return "in sync" if info.connected else "no syncer"

    def _synced(self, counters: events.Counters) -> str:
        """What synchronisation did so far, and what it cost, for a person."""
        if self._alone:
            return ""
        return (
            f"; {counters.merges_applied} broadcasts applied, {counters.pushes} pushes, "
            f"{counters.stale_steps} steps stale; "
            f"{counters.push_bytes / 1e6:,.1f} MB out, {counters.received_bytes / 1e6:,.1f} MB in; "
            f"{counters.step_seconds:.1f} s lost to sync ({self._lost_percent(counters):.1f} %)"
        )

    def _totals(self, counters: events.Counters) -> dict[str, int | float]:
        """The same for a program."""
        return {
            "merges_applied": counters.merges_applied,
            "pushes": counters.pushes,
            "push_bytes": counters.push_bytes,
            "received_bytes": counters.received_bytes,
            "stale_steps": counters.stale_steps,
            "redials": counters.redials,
            "step_seconds": round(counters.step_seconds, 3),
            "step_percent": round(self._lost_percent(counters), 3),
        }

    def _lost_percent(self, counters: events.Counters) -> float:
        """Time inside `Learner.step`, of all the time since the start."""
        return 100 * counters.step_seconds / max(self._clock() - self._began, 1e-9)

    def on_event(self, event: events.Event) -> None:
        """The `on_event` of a `Learner`; what concerns the connection it logs itself."""
        match event:
            case events.StateSaved(local_step=step, path=path):
                log_event(
                    _log, logging.DEBUG, "state", f"saved the state of step {step}", path=path
                )
            case events.BroadcastApplied(fragment=fragment, version=version):
                log_event(
                    _log,
                    logging.DEBUG,
                    "broadcast",
                    f"blended version {version} of fragment {fragment}",
                    fragment=fragment,
                    version=version,
                    local_step=event.local_step,
                )
            case events.PushSent(fragment=fragment, step=t, size=size):
                log_event(
                    _log,
                    logging.DEBUG,
                    "push",
                    f"answered round {t} of fragment {fragment}",
                    fragment=fragment,
                    t=t,
                    attempt=event.attempt,
                    bytes=size,
                    delta_norm=event.delta_norm,
                )
