"""What all integrations share: a `Learner` whose life somebody else's training loop decides."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from learner.client import Transport
from learner.config import LearnerConfig
from learner.errors import ConfigError, LearnerError
from learner.events import Event
from learner.loop import Learner
from learner.state import Stateful

log = logging.getLogger(__name__)

INSTALL_HINT = "pip install 'yeto[{0}]'"


class Hosted:
    """Joins when training begins, steps, and finishes or leaves when training ends.

    The arguments are those of `Learner`, without what only the trainer knows.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        data: Stateful | None = None,
        on_event: Callable[[Event], None] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.config = config
        self._data = data
        self._on_event = on_event
        self._transport = transport
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """The learner of the training that runs, or of the last one.

        Raises:
            LearnerError: no training has begun.
        """
        if self._learner is None:
            raise LearnerError("there is no learner before the training begins")
        return self._learner

    def begin(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Stateful],
        *,
        several_ranks: bool,
    ) -> Learner:
        """Build the learner, restore its saved state and connect; see `Learner.start`.

        Raises:
            ConfigError: durable state, and more than one optimizer or scheduler to save in it.
        """
        self.close()  # a trainer may begin again, after a batch that did not fit, say
        if self.config.state_dir is not None and max(len(optimizers), len(schedulers)) > 1:
            raise ConfigError(
                f"state_dir can save one optimizer and one scheduler; this training has "
                f"{len(optimizers)} and {len(schedulers)}"
            )
        self._learner = Learner(
            model,
            self.config,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            scheduler=schedulers[0] if len(schedulers) == 1 else None,
            data=self._data,
            on_event=self._on_event,
            transport=self._transport,
            process_group=dist.group.WORLD if several_ranks else None,
        )
        try:
            self._learner.start()
        except BaseException:
            self.close()
            raise
        return self._learner

    def step(self, tokens: int, *, reduce: bool = False) -> bool:
        """The boundary after an optimizer step; whether the training has to end here.

        The last step of a budget run includes its report and the wait for the final cut. After an
        error the learner has left.
        """
        learner = self.learner
        try:
            if learner.step(tokens, reduce=reduce).stop:
                return True
            if learner.local_step == self.config.learner_budget_steps:
                learner.finish_budget()
                return True
        except BaseException:
            self.close()
            raise
        return False

    def end(self) -> None:
        """The training is over: save the final cut and wait for the end of the run, or leave."""
        learner = self.learner
        try:
            if learner.result is not None:
                if self.config.output_dir is not None:
                    learner.save_result()
                learner.finish()
            elif self.config.address is not None:
                log.warning(
                    "the training ended after %d steps, before the syncer ended the run; the run "
                    "goes on without this learner, and there is no final model",
                    learner.local_step,
                )
        finally:
            self.close()

    def close(self) -> None:
        """Leave the run, if one was joined; safe to call again."""
        if self._learner is not None:
            self._learner.close()
