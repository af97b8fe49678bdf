"""`Learner`: what a training loop holds (section 8 of learner.md).

The training thread's side of the learner: at each step boundary it applies what the network thread
received and hands over what the syncer asked for. It waits for the network in three places only:
the first connection, the final cut, and a budget run's consolidation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from learner.artifacts import layout_text, save_artifact, write_text
from learner.backup import Backup
from learner.boundary import Boundary
from learner.client import NetworkClient, Transport
from learner.config import LearnerConfig
from learner.ending import Ending
from learner.errors import (
    BudgetFailed,
    ConfigError,
    LearnerError,
    SafetyStop,
)
from learner.events import (
    Counters,
    Event,
    Finalizing,
    Result,
    StepInfo,
)
from learner.feedback import Feedback
from learner.initial import build_hello, describe_bad, encode_init, warm_up
from learner.parameters import Parameters, find_trainables, specs_of
from learner.partition import partition
from learner.session import Session
from learner.shared import Shared
from learner.state import Identity, LocalState, Stateful, StateStore
from wire.identity import session_contract_hash

log = logging.getLogger(__name__)


class Learner:
    """One island of a run: model, layout, session and network thread.

    Use it as a context manager around the training loop; see `step`.

    Attributes:
        layout: fragments of the model; its fingerprint identifies the model in the run.
        contract: session contract, 32 bytes (W21).
        result: the end of the run once the final cut is applied and acknowledged, else None.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LearnerConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        data: Stateful | None = None,
        on_event: Callable[[Event], None] | None = None,
        transport: Transport | None = None,
    ) -> None:
        """
        Args:
            model: its floating-point parameters with requires_grad are synchronised (L1).
            config: everything else.
            optimizer, scheduler, data: saved and restored with the durable state (L50); `data`
                is whatever knows the position in the data.
            on_event: called with typed events, on the training thread only.
            transport: TLS and the seal of HELLO; None is plain TCP.

        Raises:
            LayoutError: the model cannot be synchronised, with the name of the culprit.
        """
        trainables = find_trainables(model)
        self.config = config
        self.layout = partition(
            specs_of(trainables),
            config.fragments,
            pattern=config.fragment_pattern,
            matrix_merge=config.matrix_merge,
            avg_regex=config.avg_regex,
        )
        self.contract = session_contract_hash(self.layout.fingerprint, config.run_id)
        self.result: Result | None = None
        self._parameters = Parameters(trainables, self.layout)
        self._session: Session[Tensor] = Session(len(self.layout), config.learner_budget_steps)
        self._shared = Shared(self._session)
        self._feedback = Feedback(
            len(self.layout),
            config.dtype,
            config.alpha,
            # A budget run's pushes are exactly frozen - base (L29, L42).
            enabled=config.error_feedback and config.learner_budget_steps is None,
        )
        self._on_event = on_event
        self._client = self._build_client(transport)
        self._boundary: Boundary | None = None
        self._ending: Ending | None = None
        if self._client is not None:
            self._boundary = Boundary(
                self._shared,
                self._parameters,
                self._feedback,
                self._client,
                alpha=config.alpha,
                emit=self._emit,
            )
            self._ending = Ending(
                self._shared, self._client, self._parameters, config.final_timeout_s
            )
        self._backup = Backup(
            self._shared,
            LocalState(model, self._parameters, optimizer, scheduler, data),
            self._build_store(),
            alpha=config.alpha,
            every_steps=config.state_every_steps,
        )
        self._finished = False

    def _build_client(self, transport: Transport | None) -> NetworkClient | None:
        config = self.config
        if config.address is None:
            return None
        return NetworkClient(
            config.address,
            build_hello(config, self.layout, self.contract),
            self._shared,
            self._feedback,
            blame=partial(describe_bad, self._parameters, dtype=config.dtype),
            connect_timeout_s=config.connect_timeout_s,
            transport=transport,
        )

    def _build_store(self) -> StateStore | None:
        config = self.config
        if config.state_dir is None:
            return None
        identity = Identity(
            learner_id=config.learner_id,
            fingerprint=self.layout.fingerprint,
            contract=self.contract,
            dtype=config.wire_dtype,
        )
        return StateStore(Path(config.state_dir), identity)

    # -- life -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self.result is not None:
                self.finish()
        finally:
            self.close()

    def start(self) -> None:
        """Write layout.json, restore the saved state, dial; returns once connected.

        Raises:
            ConnectTimeout: nobody answered within `connect_timeout_s`.
            StateMismatch: the state directory belongs to another learner, model or run.
            SyncerRefused: the syncer does not want this learner.
        """
        for folder in (self.config.output_dir, self.config.state_dir):
            if folder is not None:
                write_text(Path(folder) / "layout.json", layout_text(self.layout))
        self._backup.restore()
        warm_up(self._parameters, self.config.dtype)
        if self._client is None or self._boundary is None:
            return
        if self.config.learner_id == 0:
            self._shared.init = encode_init(self._parameters, self.config.dtype)
        self._client.start()
        self._shared.wait_for(lambda: self._session.generation is not None)
        if self.config.sync_every is not None:
            # Blocking mode trains from the global state, not from the seed's.
            self._boundary.await_anchors(self.config.final_timeout_s)
        self._emit_pending()

    def close(self) -> None:
        """Close the group and end the threads. Before `stop`, the run goes on without us (L70)."""
        if self._client is not None:
            self._client.close()
        self._backup.close()

    def request_stop(self) -> None:
        """End at the next step boundary, or out of any wait, with `Interrupted` (L54).

        Safe in a signal handler.
        """
        self._shared.stop_requested = True
        if self._client is not None:
            self._client.wake()

    # -- the training loop --------------------------------------------------------------------

    def step(self, tokens: int) -> StepInfo:
        """The step boundary: call it after each optimizer step (L20).

        Args:
            tokens: units of data that the step used, over all ranks; >= 0.

        Returns:
            What happened. With `stop` true the final cut is in the model and acknowledged.

        Raises:
            LearnerError: the run is over for this learner; see `learner.errors`.
        """
        started = time.perf_counter()
        try:
            return self._step(tokens)
        finally:
            self._shared.counters.step_seconds += time.perf_counter() - started

    def _step(self, tokens: int) -> StepInfo:
        if tokens < 0:
            raise ConfigError(f"tokens {tokens} is negative")
        budget = self.config.learner_budget_steps
        if self.result is not None:
            return self._info((), ())
        if budget is not None and self.local_step >= budget:
            raise BudgetFailed(f"all {budget} steps of the budget are done; call finish_budget")
        with self._shared.gate:
            self._session.advance(tokens)
        if self._client is None or self._boundary is None or self._ending is None:
            return self._baseline_step()
        self._shared.raise_fatal()
        applied: tuple[int, ...] = ()
        pushed: tuple[int, ...] = ()
        if not self._session.finalizing:
            applied, pushed = self._exchange(self._boundary)
            self._stop_if_asked()
        if self._session.finalizing:
            self._finalize(self._ending)
            return self._info(applied, pushed)
        self._client.boundary()
        self._backup.when_due()
        self._emit_pending()
        if self.local_step == self.config.max_local_steps and budget is None:
            raise SafetyStop(
                f"max_local_steps {self.local_step} reached before the syncer ended the run"
            )
        return self._info(applied, pushed)

    def _exchange(self, boundary: Boundary) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Apply and answer; in blocking mode only every so many steps, and then to the end."""
        every = self.config.sync_every
        if every is None:
            applied = boundary.apply_broadcasts()
            # A stop leaves the PULLs to those who stay.
            return applied, () if self._shared.stop_requested else boundary.answer_pulls()
        if self.local_step % every:
            return (), ()
        return boundary.synchronise(self.config.final_timeout_s)

    def _stop_if_asked(self) -> None:
        if self._shared.stop_requested:
            self._backup.now()
            self._shared.check()

    def _baseline_step(self) -> StepInfo:
        self._stop_if_asked()
        self._backup.when_due()
        self._emit_pending()
        stop = self.local_step == self.config.max_local_steps
        return StepInfo(local_step=self.local_step, stop=stop)

    def _info(self, applied: tuple[int, ...], pushed: tuple[int, ...]) -> StepInfo:
        with self._shared.gate:
            session = self._session
            self._shared.counters.pending_pulls = session.pending_pulls
            return StepInfo(
                local_step=session.local_step,
                applied=applied,
                pushed=pushed,
                pending_pulls=session.pending_pulls,
                connected=session.generation is not None,
                finalizing=session.finalizing,
                stop=self.result is not None,
            )

    # -- the end ------------------------------------------------------------------------------

    def finish_budget(self) -> Result:
        """After exactly `learner_budget_steps` steps: report, answer, finalize (section 5).

        Raises:
            BudgetFailed: wrong number of steps, no units, a lost report, or no progress.
        """
        budget = self.config.learner_budget_steps
        if budget is None or self._ending is None or self._boundary is None:
            raise ConfigError("finish_budget needs learner_budget_steps")
        if self.result is None:
            if self.local_step != budget or self.units == 0:
                raise BudgetFailed(
                    f"a budget of {budget} steps ends after exactly that many and some data; "
                    f"done are {self.local_step} steps of {self.units} units"
                )
            self._ending.report(budget)
            self._ending.consolidate(self._boundary.answer_pulls)
            return self._finalize(self._ending)
        return self.result

    def _finalize(self, ending: Ending) -> Result:
        step = ending.announce()
        self._emit(Finalizing(step))
        self._backup.now()
        manifest = ending.apply_cut()
        self.result = Result(
            step=manifest.step,
            versions=manifest.versions,
            fingerprint=self.layout.fingerprint.hex(),
            contract=self.contract.hex(),
            learner_id=self.config.learner_id,
            local_step=self.local_step,
            acknowledged=True,
        )
        self._emit_pending()
        return self.result

    def save_result(self, directory: Path | str | None = None) -> Path:
        """Write the final model and its JSON (L36).

        Args:
            directory: where; `output_dir` of the configuration when None.

        Returns:
            The path of `model.safetensors`.

        Raises:
            LearnerError: there is no final cut; a locally blended model is no result (L35).
        """
        if self.result is None:
            raise LearnerError("there is no final cut to save; the run did not end for us")
        target = directory or self.config.output_dir
        if target is None:
            raise ConfigError("save_result needs a directory, output_dir is not set")
        return save_artifact(Path(target), self._parameters, self.result)

    def finish(self) -> None:
        """After the ACK: wait for the end of the session (L34).

        Raises:
            SyncerRefused: the session did not complete; what was saved stays.
            FinalizationTimeout: no SHUTDOWN came.
        """
        if self._finished or self.result is None or self._ending is None:
            return
        self._ending.await_shutdown(self.result.step)
        self._finished = True
        self._emit_pending()

    # -- views ---------------------------------------------------------------------------------

    @property
    def local_step(self) -> int:
        """Optimizer steps so far, those of earlier processes included."""
        return self._session.local_step

    @property
    def units(self) -> int:
        """Units of data so far (L21)."""
        return self._session.units

    @property
    def connected(self) -> bool:
        """A connection group is up."""
        return self._session.generation is not None

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Per fragment the version of its anchor, None before the first broadcast."""
        with self._shared.gate:
            anchors = self._session.anchors
        return tuple(None if anchor is None else anchor.version for anchor in anchors)

    @property
    def counters(self) -> Counters:
        """Totals of L71."""
        return self._shared.counters

    # -- helpers -------------------------------------------------------------------------------

    def _emit_pending(self) -> None:
        with self._shared.gate:
            events = list(self._shared.events)
            self._shared.events.clear()
        for event in events:
            self._emit(event)

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
