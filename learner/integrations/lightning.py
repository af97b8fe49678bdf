"""A Lightning `Trainer` as a learner: `Trainer(..., callbacks=[YetoCallback(config)])`.

Needs the extra `lightning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from learner.client import Transport
from learner.config import LearnerConfig
from learner.errors import ConfigError
from learner.events import Event
from learner.integrations.hosted import INSTALL_HINT, Hosted
from learner.loop import Learner
from learner.state import Stateful

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(f"this needs lightning: {INSTALL_HINT.format('lightning')}") from error


def samples_of(batch: Any) -> int:
    """Length of the first dimension of the first tensor in a batch.

    Raises:
        ConfigError: there is no tensor with dimensions in it.
    """
    pending = [batch]
    while pending:
        item = pending.pop(0)
        if isinstance(item, Tensor):
            if item.ndim:
                return len(item)
        elif isinstance(item, Mapping):
            pending[:0] = item.values()
        elif isinstance(item, list | tuple):
            pending[:0] = item
    raise ConfigError("cannot count the samples of a batch; give the callback `tokens`")


class YetoCallback(Callback):
    """Makes a Lightning `Trainer` a learner of a run.

    The callback joins when the training starts, calls `Learner.step` after each optimizer step
    (once per `accumulate_grad_batches` batches), and stops the training when the run ends; the
    model then holds the final cut. With `output_dir` in the configuration it also saves the cut.
    An error of the learner ends `Trainer.fit` with it.

    With `state_dir`, a restarted training continues with model, optimizer, scheduler and random
    generators of the saved step; where the data continues is up to `data`, or to the `ckpt_path`
    of `fit`, over whose model the saved state wins.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        tokens: Callable[[Any], int] = samples_of,
        data: Stateful | None = None,
        on_event: Callable[[Event], None] | None = None,
        transport: Transport | None = None,
    ) -> None:
        """
        Args:
            config: of the learner.
            tokens: counts the units of one batch of this rank. All learners of a run should count
                the same unit.
            data, on_event, transport: see `Learner`.
        """
        self._hosted = Hosted(config, data=data, on_event=on_event, transport=transport)
        self._tokens = tokens
        self._units = 0
        self._step = 0

    @property
    def learner(self) -> Learner:
        """The learner, once the training has begun; its `result` after the end."""
        return self._hosted.learner

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run.

        Raises:
            ConfigError: settings under which the training would go on after the final cut.
        """
        if trainer.min_epochs or trainer.min_steps:
            raise ConfigError(
                "min_epochs and min_steps would train on after the final cut; leave them out"
            )
        self._hosted.begin(
            pl_module,
            list(trainer.optimizers),
            [entry.scheduler for entry in trainer.lr_scheduler_configs],
            several_ranks=trainer.world_size > 1,
        )
        self._units = 0
        self._step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The step boundary, when this batch completed an optimizer step."""
        self._units += self._tokens(batch)
        if trainer.global_step == self._step:
            return
        units, self._units, self._step = self._units, 0, trainer.global_step
        if self._hosted.step(units, reduce=True):
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the cut and see the run end, or leave it."""
        self._hosted.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the run: the training failed."""
        self._hosted.close()
