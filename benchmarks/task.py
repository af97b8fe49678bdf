"""The built-in task as the benchmarks train it."""

from __future__ import annotations

from typing import Protocol


class TaskSizes(Protocol):
    """How large the model and its batches are.

    Attributes:
        fragments: requested fragments (L9).
        layers, width, heads: of the built-in model.
        seq_len: tokens of a sequence.
        batch_size: sequences of one optimizer step of one learner.
        lr: inner learning rate.
    """

    @property
    def fragments(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def lr(self) -> float: ...


def task_flags(sizes: TaskSizes) -> list[str]:
    """Flags of `yeto-learner` for these sizes."""
    return [
        f"--fragments={sizes.fragments}",
        f"--layers={sizes.layers}",
        f"--width={sizes.width}",
        f"--heads={sizes.heads}",
        f"--seq-len={sizes.seq_len}",
        f"--batch-size={sizes.batch_size}",
        f"--lr={sizes.lr}",
    ]
