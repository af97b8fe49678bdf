"""`yeto-learner`: trains one task as one learner of a run (cli.md section 2)."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch

from learner.config import BASELINE, LearnerConfig
from learner.errors import LearnerError, NonFiniteParameters
from learner.loop import Learner
from learner.options import Options, learner_options, read_options
from learner.progress import Progress
from learner.protection import open_transport
from learner.tasks.base import Task, TaskError, build_task
from wire.cli_support import Command, setup_logging

_log = logging.getLogger("learner.cli")


@click.command(cls=Command)
@learner_options
def main(**values: Any) -> None:
    """Train as one learner of a run; the syncer at --connect merges what the learners find.

    Exit codes: 0 the final model is applied and acknowledged (or the baseline is done),
    1 the run failed or was stopped, 2 usage error.
    """
    options = read_options(values)
    setup_logging(options.log_level, options.log_format)
    try:
        run(options)
    except TaskError as error:
        raise click.UsageError(str(error)) from error
    except LearnerError as error:
        _log.error("%s", error)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that was taken away
        _log.error("%s", error)
        sys.exit(1)
    except (RuntimeError, ArithmeticError, MemoryError) as error:  # of the task, as a rule
        _log.debug("where it failed", exc_info=True)
        what = f"{type(error).__name__}: {error}"
        _log.error("training failed with %s (--log-level debug says where)", what)
        sys.exit(1)


class StopSignals:
    """SIGINT and SIGTERM end the run at the next step boundary (L54), or at once before it."""

    def __init__(self) -> None:
        self._learner: Learner | None = None
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def hand_over_to(self, learner: Learner) -> None:
        """From now on the learner is asked to stop, instead of ending the process here."""
        self._learner = learner

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._learner is None:
            sys.exit(1)
        self._learner.request_stop()


def run(options: Options) -> None:
    """Builds the task and trains it to the end of the run.

    Raises:
        TaskError: the task cannot be built as asked.
        LearnerError: the run did not end well.
    """
    signals = StopSignals()
    transport = open_transport(options.config, os.environ)
    torch.set_num_threads(options.threads)
    for flag, folder in (
        ("--output-dir", options.config.output_dir),
        ("--state-dir", options.config.state_dir),
    ):
        _make_folder(flag, folder)
    task = build_task(options.task, options.settings)
    live = options.log_format == "text" and sys.stderr.isatty()
    with Progress(live=live, alone=options.config.connect == BASELINE) as progress:
        learner = Learner(
            task.model,
            options.config,
            optimizer=task.optimizer,
            data=task,
            on_event=progress.on_event,
            transport=transport,
        )
        signals.hand_over_to(learner)
        with learner:
            _train(task, learner, options, progress)
        progress.finished(learner.result, learner.local_step, task.evaluate(), learner.counters)


def _make_folder(flag: str, folder: Path | str | None) -> None:
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"cannot create {flag} {folder}: {error.strerror}") from error


def _train(task: Task, learner: Learner, options: Options, progress: Progress) -> None:
    """The training loop: one call of `step` after each optimizer step is all it takes."""
    last = _last_step(options.config)
    progress.evaluated(learner.local_step, task.evaluate())
    while last is None or learner.local_step < last:
        step = task.train_step()
        if not math.isfinite(step.loss):
            raise NonFiniteParameters(
                f"the training loss of step {learner.local_step + 1} is {step.loss}; nothing of it "
                f"was sent; a lower --lr than {options.settings.lr:g} may help"
            )
        info = learner.step(tokens=step.tokens)
        progress.stepped(step, info, learner.counters)
        if info.stop:
            break
        if info.local_step % options.eval_every_steps == 0:
            progress.evaluated(info.local_step, task.evaluate())
    if options.config.learner_budget_steps is not None:
        learner.finish_budget()
    if learner.result is not None:
        if options.config.output_dir is not None:
            _log.info("saved the final model in %s", learner.save_result())
        learner.finish()


def _last_step(config: LearnerConfig) -> int | None:
    """Where the loop ends by itself; None when the syncer says when (or the safety stop)."""
    if config.learner_budget_steps is not None:
        return config.learner_budget_steps
    return config.max_local_steps if config.connect == BASELINE else None
