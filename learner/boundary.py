"""The step boundary: broadcasts into the model, deltas out of it (section 3)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from learner.buffers import Buffers
from learner.client import NetworkClient
from learner.errors import LearnerError, NonFiniteParameters, SyncTimeout
from learner.events import BroadcastApplied, Event
from learner.feedback import Feedback
from learner.outgoing import Push
from learner.parameters import Parameters
from learner.shared import Shared
from learner.staging import widen
from wire.tensors import NonFiniteValues

log = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""Seconds between two log lines of a blocking wait."""


class Boundary:
    """What the training thread does to the model between two optimizer steps."""

    def __init__(
        self,
        shared: Shared,
        parameters: Parameters,
        feedback: Feedback,
        client: NetworkClient,
        buffers: Buffers,
        *,
        alpha: float,
        blame: Callable[[int, Tensor], str],
        emit: Callable[[Event], None],
        saving: Callable[[], bool],
    ) -> None:
        """
        Args:
            shared, parameters, feedback, client, buffers: the parts of the learner.
            alpha: local share of the blend.
            blame: says which tensor makes a delta unsendable (L27).
            emit: reports an event.
            saving: the anchors are being written to the disk.
        """
        self._shared = shared
        self._session = shared.session
        self._parameters = parameters
        self._feedback = feedback
        self._client = client
        self._buffers = buffers
        self._alpha = alpha
        self._blame = blame
        self._emit = emit
        self._saving = saving

    def apply_broadcasts(self) -> tuple[int, ...]:
        """Blend the newest waiting broadcast of each fragment (L20, L26); returns which."""
        with self._shared.gate:
            due = self._session.take_broadcasts()
            rolled_back, self._session.rolled_back = self._session.rolled_back, False
            warnings, self._session.warnings = self._session.warnings, []
        for text in warnings:
            log.warning("%s", text)
        if rolled_back:
            self._feedback.reset()
        applied = tuple(apply.fragment for apply in due)
        while due:  # what a broadcast replaces is free before the next one is applied
            apply = due.pop(0)
            fragment, received = apply.fragment, apply.received
            anchor = self._anchor(received.values, apply.previous)
            if apply.blend:
                self._parameters.blend(fragment, anchor, self._alpha)
            with self._shared.gate:
                self._session.applied(apply, anchor)
                self._shared.counters.merges_applied += apply.blend
            self._feedback.applied(fragment, received.version)
            self._emit(BroadcastApplied(fragment, received.version, self._session.local_step))
        return applied

    def _anchor(self, received: Tensor, previous: Tensor | None = None) -> Tensor:
        """The f32 values of a broadcast, in the memory of the anchor that they replace (L22).

        Widening them here, not on arrival, spares a buffer for each broadcast that waits.
        """
        if received.dtype is torch.float32:
            return received
        if previous is None or self._saving():
            previous = self._buffers.take(len(received))
        widen(received, previous)
        return previous

    def answer_pulls(self, *, once: bool = False) -> tuple[int, ...]:
        """One snapshot, the delta, per PULL that can be answered (L23, L28); returns which.

        `once` as in `Session.take_answers`.
        """
        with self._shared.gate:
            answers = self._session.take_answers(once=once)
        for answer in answers:
            # The base of a budget run was never applied, and is as it arrived (L42).
            anchor = self._anchor(answer.anchor)
            delta = self._delta(answer.pull.fragment, anchor)
            if delta is not None:
                self._client.push(Push(answer, delta))
        return tuple(answer.pull.fragment for answer in answers)

    def _delta(self, fragment: int, anchor: Tensor) -> Tensor | memoryview | None:
        """The delta, encoded where that is done at once; None: it cannot be, which is fatal."""
        terms = None
        if self._feedback.direct:
            terms = self._parameters.delta_terms(fragment, anchor)
        if terms is None:
            return self._parameters.delta(fragment, anchor)
        try:
            return self._feedback.encode_difference(self._parameters.numels[fragment], terms)
        except NonFiniteValues:
            delta = self._parameters.delta(fragment, anchor)
            self._shared.fail(NonFiniteParameters(self._blame(fragment, delta)))
            return None

    def synchronise(self, limit_s: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocking mode: until every fragment is pulled, merged, and applied here.

        Returns:
            The fragments applied and pushed meanwhile. It returns early when the end of the run or
            a stop is there; the caller looks for that anyway.

        Raises:
            SyncTimeout: nothing moved for `limit_s` seconds.
        """
        applied: list[int] = []
        pushed: list[int] = []

        def advance() -> list[int]:
            applied.extend(self.apply_broadcasts())
            pushed.extend(self.answer_pulls(once=True))
            return self._session.behind()

        self._repeat(advance, limit_s, "the merge")
        return tuple(applied), tuple(pushed)

    def await_anchors(self, limit_s: float) -> None:
        """Blocking mode, before the first step: until every fragment's broadcast is applied."""

        def advance() -> list[int]:
            self.apply_broadcasts()
            return self._session.unanchored()

        self._repeat(advance, limit_s, "the first broadcast")

    def _repeat(self, advance: Callable[[], list[int]], limit_s: float, what: str) -> None:
        """Call `advance` after each event until it names no fragment; say what is awaited."""
        say_at = time.monotonic() + SAY_EVERY_S
        seen, moved_at = -1, time.monotonic()
        while True:
            with self._shared.gate:
                if seen != self._shared.progress:
                    seen, moved_at = self._shared.progress, time.monotonic()
            missing = advance()
            if not missing or self._session.finalizing or self._shared.stop_requested:
                return
            awaited = f"{what} of fragment {', '.join(map(str, missing))}"
            if time.monotonic() >= say_at:
                log.info("step %d waits for %s", self._session.local_step, awaited)
                say_at = time.monotonic() + SAY_EVERY_S
            late = SyncTimeout(
                f"step {self._session.local_step} waited {limit_s:g} s for {awaited}; "
                "is the quorum reachable?"
            )
            self._wait_for_progress(seen, say_at, moved_at + limit_s, late)

    def _wait_for_progress(
        self, seen: int, say_at: float, deadline: float, late: LearnerError
    ) -> None:
        def ready() -> bool:
            return self._shared.progress != seen or time.monotonic() >= say_at

        left = deadline - time.monotonic()
        self._shared.wait_for(ready, left, lambda: late, wake_at=say_at)
