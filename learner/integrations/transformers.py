"""A `transformers.Trainer` as a learner: `Trainer(..., callbacks=[YetoCallback(config)])`.

Needs the extra `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from learner.client import Transport
from learner.config import LearnerConfig
from learner.errors import ConfigError
from learner.events import Event
from learner.integrations.hosted import INSTALL_HINT, Hosted
from learner.loop import Learner
from learner.state import Stateful

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"this needs transformers: {INSTALL_HINT.format('transformers')}") from error


class YetoCallback(TrainerCallback):
    """Makes a `Trainer` a learner of a run.

    The callback joins when the training begins, calls `Learner.step` after each optimizer step
    (once per `gradient_accumulation_steps` batches), and stops the training when the run ends; the
    model then holds the final cut. With `output_dir` in the configuration it also saves the cut.
    An error of the learner ends `Trainer.train` with it.

    With `state_dir`, a restarted trainer continues at the saved step with model, optimizer,
    scheduler and random generators; where the data continues is up to `data`, or to the Trainer's
    own `resume_from_checkpoint`, over whose model the saved state wins.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        tokens: int | None = None,
        data: Stateful | None = None,
        on_event: Callable[[Event], None] | None = None,
        transport: Transport | None = None,
    ) -> None:
        """
        Args:
            config: of the learner.
            tokens: units per optimizer step, over all ranks. When None they are what
                `include_num_input_tokens_seen` of the training arguments counts, and without that
                the samples of a step. All learners of a run should count the same unit.
            data, on_event, transport: see `Learner`.
        """
        self._hosted = Hosted(config, data=data, on_event=on_event, transport=transport)
        self._tokens = tokens
        self._seen = 0

    @property
    def learner(self) -> Learner:
        """The learner, once the training has begun; its `result` after the end."""
        return self._hosted.learner

    def close(self) -> None:
        """Leave the run; for a training that ended with an error of its own."""
        self._hosted.close()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: Any,
    ) -> None:
        """Join the run.

        Raises:
            ConfigError: arguments under which the final cut would not stay in the model.
        """
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end would replace the final cut by a local model; turn it off"
            )
        learner = self._hosted.begin(
            rest["model"],
            [rest["optimizer"]],
            [rest["lr_scheduler"]],
            several_ranks=args.world_size > 1,
        )
        state.global_step = max(state.global_step, learner.local_step)
        self._seen = state.num_input_tokens_seen

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> TrainerControl:
        """The step boundary."""
        if self._hosted.step(self._units(args, state)):
            control.should_training_stop = True
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Save the cut and see the run end, or leave it."""
        self._hosted.end()

    def _units(self, args: TrainingArguments, state: TrainerState) -> int:
        if self._tokens is not None:
            return self._tokens
        if args.include_num_input_tokens_seen != "no":
            before, self._seen = self._seen, int(state.num_input_tokens_seen)
            return self._seen - before
        samples: int = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return samples
