"""One process that trains on all learners' data in step, and the held-out loss of any model.

The baseline sees the same windows in the same order as the M learners together: its step i is one
optimizer step on the union of their batches i. Tokens, steps, learning rate and initial model are
the same; what differs is that it synchronises every gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.budget.plan import Sizes
from learner.tasks.base import TaskSettings
from learner.tasks.bytes_lm import CLIP_NORM, BytesLM, loss_of
from learner.tasks.text import Corpus, read_text


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss in nats per byte, before and after training, and the tokens in between."""

    initial: float
    final: float
    tokens: int


def data_sha256(data: Path | None) -> str:
    """Of the text that everyone trains on."""
    return hashlib.sha256(read_text(data).data).hexdigest()


def settings(sizes: Sizes, seed: int, data: Path | None, learner: int = 0) -> TaskSettings:
    """The task of one learner."""
    return TaskSettings(
        seed=seed,
        learner_id=learner,
        seq_len=sizes.seq_len,
        batch_size=sizes.batch_size,
        lr=sizes.lr,
        data=data,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
    )


def train_together(
    sizes: Sizes, learners: int, seed: int, data: Path | None, tick: Callable[[int], None]
) -> Evaluation:
    """The synchronous baseline; calls `tick(step)` after every step."""
    task = BytesLM(settings(sizes, seed, data))
    initial = task.evaluate()
    text = read_text(data)
    corpora = [
        Corpus(text, seq_len=sizes.seq_len, seed=seed, learner_id=learner)
        for learner in range(learners)
    ]
    task.model.train()
    tokens = 0
    for position in range(sizes.steps):
        batches = [corpus.batch(position, sizes.batch_size) for corpus in corpora]
        windows = torch.from_numpy(np.concatenate(batches))
        task.optimizer.zero_grad(set_to_none=True)
        loss_of(task.model, windows).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(task.model.parameters(), CLIP_NORM)
        task.optimizer.step()
        tokens += len(windows) * sizes.seq_len
        tick(position + 1)
    return Evaluation(initial, task.evaluate(), tokens)


def evaluate_export(
    tensors: Mapping[str, Tensor], sizes: Sizes, seed: int, data: Path | None
) -> float:
    """Held-out loss of an exported model.

    Raises:
        RuntimeError: the tensors do not fit the model.
    """
    task = BytesLM(settings(sizes, seed, data))
    task.model.load_state_dict({**tensors, "lm_head.weight": tensors["embed.weight"]})
    return task.evaluate()


def check_baseline(found: Evaluation, sizes: Sizes, learners: int) -> list[str]:
    """The budget was spent exactly, and the losses mean something."""
    violations = check_loss(found.final)
    if found.tokens != learners * sizes.tokens:
        violations.append(
            f"the baseline trained on {found.tokens} tokens, the budget of {learners} learners "
            f"is {learners * sizes.tokens}"
        )
    return violations


def check_loss(loss: float) -> list[str]:
    """A held-out loss is a finite number."""
    return [] if math.isfinite(loss) else [f"the held-out loss is {loss}"]
