"""What the training thread and the network thread have in common, and the lock around it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from learner.errors import Interrupted, LearnerError
from learner.events import Counters, Event
from learner.session import Session

MAX_EVENTS = 1024
"""Events kept for a training loop that does not come by to take them; the oldest go first."""


@dataclass
class Shared:
    """The session, under `gate`; everything here is read and written with the gate held.

    Attributes:
        session: the state machine.
        init: encoded INIT tensors in layout order, empty unless this is learner 0, and once a
            broadcast of every fragment was received (L14).
        gate: notified whenever something changed that a waiting training thread may want.
        counters: totals of L71.
        fatal: the first fatal error; raised at the next step boundary (L13).
        events: reports for the training thread, oldest first.
        acknowledged: FINAL_ACK is written to the connection (L34).
        unconfirmed: the run ended without SHUTDOWN because nobody answered any more (L34).
        progress: grows with everything that counts as progress of a wait (L43).
        stop_requested: set by `Learner.request_stop`, possibly from a signal handler, and
            therefore the one field that is written without the gate.
    """

    session: Session[Tensor]
    init: list[memoryview] = field(default_factory=list)
    gate: threading.Condition = field(default_factory=threading.Condition)
    counters: Counters = field(default_factory=Counters)
    fatal: LearnerError | None = None
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    acknowledged: bool = False
    unconfirmed: bool = False
    progress: int = 0
    stop_requested: bool = False

    def fail(self, error: LearnerError) -> None:
        """Record a fatal error; the first one counts."""
        with self.gate:
            if self.fatal is None:
                self.fatal = error
            self.gate.notify_all()

    def advance(self, event: Event | None = None) -> None:
        """Something moved: wake who waits."""
        with self.gate:
            self.progress += 1
            if event is not None:
                self.events.append(event)
            self.gate.notify_all()

    def raise_fatal(self) -> None:
        """Raise the recorded fatal error, if there is one."""
        with self.gate:
            if self.fatal is not None:
                raise self.fatal

    def check(self) -> None:
        """`raise_fatal`, or Interrupted when a stop was requested."""
        self.raise_fatal()
        if self.stop_requested:
            raise Interrupted("stopped on request; the run continues without this learner")

    def wait_for(
        self,
        ready: Callable[[], bool],
        limit_s: float | None = None,
        late: Callable[[], LearnerError] | None = None,
        *,
        wake_at: float | None = None,
    ) -> None:
        """Block the training thread until `ready()`; it is called with the gate held.

        Args:
            ready: the condition.
            limit_s: seconds, None without a limit.
            late: what to raise when the limit has passed.
            wake_at: a moment (`time.monotonic`) at which `ready` is asked again in any case.

        Raises:
            LearnerError: fatal, interrupted, or late.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        with self.gate:
            while True:
                self.check()
                if ready():
                    return
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0 and late is not None:
                    raise late()
                if wake_at is not None:
                    pause = max(0.0, wake_at - time.monotonic())
                    left = pause if left is None else min(left, pause)
                self.gate.wait(left)
