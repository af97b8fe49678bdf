"""How a learner's run ends: budget consolidation, the final cut, the farewell (sections 4 and 5).

These are the waits of the training thread (L16); each is bounded, and each raises what became
fatal meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from learner.client import NetworkClient
from learner.errors import BudgetFailed, FinalizationTimeout, SyncerRefused
from learner.parameters import Parameters
from learner.session import Mode
from learner.shared import Shared
from wire.messages import FinalManifest

log = logging.getLogger(__name__)


class Ending:
    """Waits and actions of the training thread after the last optimizer step."""

    def __init__(
        self, shared: Shared, client: NetworkClient, parameters: Parameters, limit_s: float
    ) -> None:
        self._shared = shared
        self._session = shared.session
        self._client = client
        self._parameters = parameters
        self._limit_s = limit_s

    # -- budget run ---------------------------------------------------------------------------

    def report(self, steps: int) -> None:
        """Send BUDGET_DONE, once, on the connection that is up or comes up next (L40)."""
        self._shared.wait_for(
            lambda: self._session.generation is not None,
            self._limit_s,
            lambda: BudgetFailed(f"no connection for {self._limit_s:g} s to report the budget on"),
        )
        with self._shared.gate:
            generation = self._session.report_budget()
        if generation is not None:
            self._client.report_budget(generation, steps)
        log.info("the budget of %d steps is done; waiting for the consolidation", steps)

    def consolidate(self, answer_pulls: Callable[[], object]) -> None:
        """Answer PULLs from the frozen parameters until the manifest comes (L42, L43)."""
        while True:
            with self._shared.gate:
                seen, finalizing = self._shared.progress, self._session.finalizing
            if finalizing:
                return
            answer_pulls()
            self._wait_for_progress(seen)

    def _wait_for_progress(self, seen: int) -> None:
        self._shared.wait_for(
            lambda: self._shared.progress != seen,
            self._limit_s,
            lambda: BudgetFailed(f"the consolidation made no progress for {self._limit_s:g} s"),
        )

    # -- finalization ---------------------------------------------------------------------------

    def announce(self) -> int:
        """Say that the end has come; returns the final step."""
        step = self._manifest().step
        log.info("the syncer ends the run at step %d; waiting for the final cut", step)
        return step

    def apply_cut(self) -> FinalManifest:
        """Wait for the cut, overwrite every trainable, acknowledge (L30-L32).

        Returns once FINAL_ACK is written.
        """
        session = self._session
        self._shared.wait_for(lambda: not session.missing(), self._limit_s, self._late_cut)
        with self._shared.gate:
            values = session.cut()
        self._parameters.apply_cut(values)
        with self._shared.gate:
            generation = session.applied_cut()
        if generation is not None:
            self._client.acknowledge(generation)
        self._shared.wait_for(
            lambda: self._shared.acknowledged or session.mode is Mode.ENDED,
            self._limit_s,
            self._late_ack,
        )
        return self._manifest()

    def await_shutdown(self, step: int) -> None:
        """After the ACK: wait until the syncer says goodbye (L34)."""
        try:
            self._shared.wait_for(
                lambda: self._session.mode is Mode.ENDED,
                self._limit_s,
                lambda: FinalizationTimeout(
                    f"no SHUTDOWN for {self._limit_s:g} s after our FINAL_ACK"
                ),
            )
        except SyncerRefused as error:
            raise SyncerRefused(
                f"{error} (the session did not complete; the final model of step {step} is "
                "applied, and what was saved of it stays)"
            ) from error

    def _manifest(self) -> FinalManifest:
        manifest = self._session.manifest
        if manifest is None:
            raise RuntimeError("finalization without a manifest")
        return manifest

    def _late_cut(self) -> FinalizationTimeout:
        lines = ", ".join(
            f"fragment {fragment} wants version {wanted} and has {held}"
            for fragment, wanted, held in self._session.missing()
        )
        return FinalizationTimeout(
            f"the final cut is not complete after {self._limit_s:g} s: {lines}"
        )

    def _late_ack(self) -> FinalizationTimeout:
        return FinalizationTimeout(
            f"the final cut is applied, but for {self._limit_s:g} s there was no connection on "
            "which to acknowledge it"
        )
