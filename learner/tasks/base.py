"""What a training task offers to `yeto-learner`, and how tasks are found by name.

A task is any class with the members of `Task` whose factory takes one `TaskSettings`. Packages
make theirs known through the entry-point group `yeto.tasks`; `--task NAME` then finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch

ENTRY_POINT_GROUP = "yeto.tasks"


class TaskError(Exception):
    """The task cannot be built as asked (no such task, too little data, impossible sizes)."""


@dataclass(frozen=True)
class TaskSettings:
    """What the command line says about the task; lengths in tokens, `lr` per optimizer step."""

    seed: int
    learner_id: int
    seq_len: int = 256
    batch_size: int = 8
    lr: float = 3e-4
    data: Path | None = None
    layers: int = 4
    width: int = 128
    heads: int = 4


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step: mean training loss (nats per token), tokens it was computed on."""

    loss: float
    tokens: int


@runtime_checkable
class Task(Protocol):
    """A model, its optimizer, and the data of one learner.

    The initial parameters depend on `TaskSettings.seed` and the sizes only, so that all learners
    start equal (L15); the order of the data also depends on the learner id.
    """

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def train_step(self) -> TrainStep:
        """One optimizer step on the next batch of this learner's data."""
        ...

    def evaluate(self) -> float:
        """Held-out loss in nats per byte, on text that no learner trains on."""
        ...

    def state_dict(self) -> dict[str, int]:
        """Where the data order stands, for the durable state (L50)."""
        ...

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues the data order at a value of `state_dict`."""
        ...


TaskFactory = Callable[[TaskSettings], Task]

_BUILT_IN = (EntryPoint("bytes-lm", "learner.tasks.bytes_lm:BytesLM", ENTRY_POINT_GROUP),)


def installed_tasks() -> dict[str, EntryPoint]:
    """Name -> entry point of every task that can be asked for; nothing is imported yet."""
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **{point.name: point for point in _BUILT_IN}}


def build_task(name: str, settings: TaskSettings) -> Task:
    """Imports and builds one installed task; TaskError when there is none of that name."""
    tasks = installed_tasks()
    if name not in tasks:
        raise TaskError(f"no task named {name!r}; installed: {', '.join(sorted(tasks))}")
    return cast(TaskFactory, tasks[name].load())(settings)
