"""`Learner`: what a training loop holds (section 8 of learner.md).

The training thread's side of the learner: at each step boundary it applies what the network thread
received and hands over what the syncer asked for. It waits for the network in three places only:
the first connection, the final cut, and a budget run's consolidation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.artifacts import layout_text, save_artifact, write_text
from learner.backup import Backup
from learner.buffers import Buffers
from learner.client import Transport
from learner.config import LearnerConfig
from learner.core import Core
from learner.errors import BudgetFailed, ConfigError, LayoutError, LearnerError
from learner.events import Counters, Event, Result, StepInfo
from learner.initial import warm_up
from learner.island import LedParameters
from learner.masters import Masters, masters_in, no_masters
from learner.parameters import Parameters, find_trainables, specs_of
from learner.partition import partition
from learner.protection import open_transport
from learner.ranks import Ranks
from learner.roles import Baseline, Following, Leading, Role
from learner.session import Session
from learner.shared import Shared
from learner.state import Identity, LocalState, Stateful, StateStore
from wire.identity import session_contract_hash


class Learner:
    """One island of a run: model, layout, session and network thread.

    Use it as a context manager around the training loop; see `step`.

    Attributes:
        config: the settings it was built with.
        layout: fragments of the model; its fingerprint identifies the model in the run.
        contract: session contract, 32 bytes (W21).
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
        process_group: dist.ProcessGroup | None = None,
        masters: Masters | None = None,
    ) -> None:
        """
        Args:
            model: its floating-point parameters with requires_grad are synchronised (L1).
            config: everything else.
            optimizer, scheduler, data: saved and restored with the durable state (L50); `data`
                is whatever knows the position in the data.
            on_event: called with typed events, on the training thread only, and on the first rank
                only.
            transport: TLS and the seal of HELLO; None is what `config` says.
            process_group: all ranks of an island of several (L60). Each rank makes its own Learner
                and calls the same methods; the first rank talks. Its timeout must exceed
                `final_timeout_s` and `connect_timeout_s`. Needed for sharded parameters (FSDP2).
            masters: gives the f32 master copy of a bf16 or f16 parameter, or None while there is
                none. Asked at each boundary. By default the state of `optimizer` is searched, see
                `learner.masters.NAMES`.

        Raises:
            LayoutError: the model cannot be synchronised, with the name of the culprit.
            ConfigError: a key or certificate cannot be used, or another machine is to get the
                model without either (S21).
        """
        several = process_group is not None and dist.get_world_size(process_group) > 1
        self._ranks = Ranks(process_group) if several and process_group is not None else None
        trainables = find_trainables(model, sharded=process_group is not None)
        self.config = config
        self.layout = partition(
            specs_of(trainables),
            config.fragments,
            pattern=config.fragment_pattern,
            matrix_merge=config.matrix_merge,
            avg_regex=config.avg_regex,
        )
        self.contract = session_contract_hash(self.layout.fingerprint, config.run_id)
        buffers = Buffers()
        if masters is None:
            masters = no_masters if optimizer is None else masters_in(optimizer)
        parameters = self._map(trainables, buffers, masters)
        shared = Shared(Session[Tensor](len(self.layout), config.learner_budget_steps))
        backup = Backup(
            shared,
            LocalState(model, parameters, optimizer, scheduler, data),
            self._store(),
            alpha=config.alpha,
            every_steps=config.state_every_steps,
            ranks=self._ranks,
        )
        self._core = Core(
            config=config,
            layout=self.layout,
            contract=self.contract,
            parameters=parameters,
            buffers=buffers,
            shared=shared,
            backup=backup,
            on_event=on_event if self._leading else None,
        )
        self._role = self._choose_role(transport)
        self._finished = False

    def _map(
        self, trainables: dict[str, nn.Parameter], buffers: Buffers, masters: Masters
    ) -> Parameters:
        synced = self._ranks if self.config.address is not None else None
        if synced is not None and synced.leading:
            return LedParameters(trainables, self.layout, synced, buffers.take, masters)
        return Parameters(trainables, self.layout, take=buffers.take, masters=masters)

    def _store(self) -> StateStore | None:
        config = self.config
        if config.state_dir is None:
            return None
        identity = Identity(
            learner_id=config.learner_id,
            fingerprint=self.layout.fingerprint,
            contract=self.contract,
            dtype=config.wire_dtype,
        )
        root = Path(config.state_dir)
        if self._ranks is not None and not self._ranks.leading:
            root = root / f"rank-{self._ranks.rank}"
        return StateStore(root, identity)

    def _choose_role(self, transport: Transport | None) -> Role:
        address = self.config.address
        if address is None:
            return Baseline(self._core)
        if self._ranks is None or self._ranks.leading:
            transport = transport or open_transport(self.config, os.environ)
            return Leading(self._core, address, transport, self._ranks)
        return Following(self._core, self._ranks)

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
        if self._ranks is not None and not self._ranks.same(self.layout.fingerprint):
            raise LayoutError("the ranks of this island have different models or settings")
        if self._ranks is None or self._ranks.leading:
            for folder in (self.config.output_dir, self.config.state_dir):
                if folder is not None:
                    write_text(Path(folder) / "layout.json", layout_text(self.layout))
        warm_up(self._core.parameters, self.config.dtype)
        self._role.start()

    def close(self) -> None:
        """Close the group and end the threads. Before `stop`, the run goes on without us (L70)."""
        self._role.close()
        self._core.backup.close()

    def request_stop(self) -> None:
        """End at the next step boundary, or out of any wait, with `Interrupted` (L54).

        Safe in a signal handler.
        """
        self._core.shared.stop_requested = True
        self._role.wake()

    # -- the training loop --------------------------------------------------------------------

    def step(self, tokens: int, *, reduce: bool = False) -> StepInfo:
        """The step boundary: call it after each optimizer step (L20).

        Args:
            tokens: units of data that the step used, over all ranks; >= 0.
            reduce: `tokens` are this rank's; sum them over the ranks here (L61).

        Returns:
            What happened. With `stop` true the final cut is in the model and acknowledged.

        Raises:
            LearnerError: the run is over for this learner; see `learner.errors`.
        """
        started = time.perf_counter()
        try:
            return self._step(tokens, reduce)
        finally:
            self.counters.step_seconds += time.perf_counter() - started

    def _step(self, tokens: int, reduce: bool) -> StepInfo:
        if tokens < 0:
            raise ConfigError(f"tokens {tokens} is negative")
        if self.result is not None:
            return self._core.info()
        budget = self.config.learner_budget_steps
        if budget is not None and self.local_step >= budget:
            raise BudgetFailed(f"all {budget} steps of the budget are done; call finish_budget")
        if reduce and self._ranks is not None:
            tokens = self._ranks.total(tokens)
        with self._core.shared.gate:
            self._core.shared.session.advance(tokens)
        return self._role.step()

    # -- the end ------------------------------------------------------------------------------

    def finish_budget(self) -> Result:
        """After exactly `learner_budget_steps` steps: report, answer, finalize (section 5).

        Raises:
            BudgetFailed: wrong number of steps, no units, a lost report, or no progress.
        """
        budget = self.config.learner_budget_steps
        if budget is None:
            raise ConfigError("finish_budget needs learner_budget_steps")
        if self.result is None:
            if self.local_step != budget or self.units == 0:
                raise BudgetFailed(
                    f"a budget of {budget} steps ends after exactly that many and some data; "
                    f"done are {self.local_step} steps of {self.units} units"
                )
            self._role.finish_budget()
        if self.result is None:
            raise LearnerError("the budget run ended without a final cut")
        return self.result

    def save_result(self, directory: Path | str | None = None) -> Path:
        """Write the final model and its JSON (L36); only the first rank of an island writes.

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
        cut = self._core.shared.session.cut() if self._leading else ()
        return save_artifact(Path(target), self._core.parameters, cut, self.result)

    def finish(self) -> None:
        """After the ACK: wait for the end of the session (L34).

        Raises:
            SyncerRefused: the session did not complete; what was saved stays.
            FinalizationTimeout: no SHUTDOWN came.
        """
        if not self._finished and self.result is not None:
            self._finished = True
            self._role.finish()

    # -- views ---------------------------------------------------------------------------------

    @property
    def result(self) -> Result | None:
        """The end of the run once the final cut is applied and acknowledged, else None."""
        return self._core.result

    @property
    def local_step(self) -> int:
        """Optimizer steps so far, those of earlier processes included."""
        return self._core.local_step

    @property
    def units(self) -> int:
        """Units of data so far (L21)."""
        return self._core.shared.session.units

    @property
    def connected(self) -> bool:
        """A connection group is up."""
        return self._core.shared.session.generation is not None

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Per fragment the version of its anchor, None before the first broadcast."""
        with self._core.shared.gate:
            anchors = self._core.shared.session.anchors
        return tuple(None if anchor is None else anchor.version for anchor in anchors)

    @property
    def counters(self) -> Counters:
        """Totals of L71."""
        return self._core.shared.counters

    @property
    def _leading(self) -> bool:
        return self._ranks is None or self._ranks.leading
