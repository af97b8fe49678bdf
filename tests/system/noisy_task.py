"""A task whose every step draws from all random generators, and which can stand still.

`install()` makes it known as `--task noisy`. With NOISY_PAUSE=STEP:FILE in the environment it makes
FILE once STEP optimizer steps and their boundary are done, and then waits to be killed.
"""

from __future__ import annotations

import os
import random
import signal
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import torch
from torch import nn

from learner.tasks import base
from learner.tasks.base import TaskSettings, TrainStep

WIDTH = 16


class Noisy:
    def __init__(self, settings: TaskSettings) -> None:
        torch.manual_seed(settings.seed)
        self.model = nn.Sequential()
        self.model.add_module("embed", nn.Embedding(32, WIDTH))
        self.model.add_module("drop", nn.Dropout(0.2))
        self.model.add_module("inner", nn.Linear(WIDTH, WIDTH))
        self.model.add_module("norm", nn.LayerNorm(WIDTH))
        self.model.add_module("outer", nn.Linear(WIDTH, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(settings.learner_id)
        np.random.seed(settings.learner_id)
        random.seed(settings.learner_id)
        self._learner_id = settings.learner_id
        self._position = 0
        step, _, file = os.environ.get("NOISY_PAUSE", "").partition(":")
        self._pause = (int(step), Path(file)) if step else None

    def train_step(self) -> TrainStep:
        if self._pause is not None and self._position == self._pause[0]:
            self._pause[1].touch()
            signal.pause()
        draw = np.random.default_rng([self._learner_id, self._position])
        self._position += 1
        tokens = torch.from_numpy(draw.integers(0, 32, 24))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(tokens), (tokens * 5 + 1) % 32)
        (loss * (0.5 + np.random.rand() + random.random())).backward()
        self.optimizer.step()
        # Unequal counts, so that the weights of the merge matter.
        return TrainStep(loss.item(), 24 + self._learner_id)

    def evaluate(self) -> float:
        return 0.0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def install() -> None:
    point = EntryPoint("noisy", f"{__name__}:Noisy", base.ENTRY_POINT_GROUP)
    base._BUILT_IN = (*base._BUILT_IN, point)
