"""What goes into the merge of one round, and what comes out (numerics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from syncer.events import Member
from wire.dtypes import DType
from wire.layout import NumericFragment
from wire.messages import Buffer


class SvdBackend(Protocol):
    """Where the SVDs of iso run (N14)."""

    def flatten(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Flatten f32 matrices of any shapes (N12); blocks; results in the same order."""


class NonFiniteMerge(Exception):
    """The merge, the new momentum or the new parameters are not finite (N23).

    Attributes:
        largest: the responder with the largest gradient norm (C34).
    """

    def __init__(self, largest: Member) -> None:
        super().__init__(f"merge is not finite, largest gradient from learner {largest.learner_id}")
        self.largest = largest


@dataclass(frozen=True, slots=True)
class Response:
    """One accepted PUSH.

    Attributes:
        member: its sender.
        payload: the learner delta as it came, session dtype.
        c_tokens: tokens since the learner's base.
        c_steps: optimizer steps since the learner's base, >= 1.
    """

    member: Member
    payload: Buffer
    c_tokens: int
    c_steps: int


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """What of the configuration enters a merge (numerics.md).

    Attributes:
        lr: outer learning rate of this fragment (N19).
        momentum: Nesterov mu.
        heloco: whether the directional correction runs (N15).
        equal_weights: `--learner-weight equal` (N5).

    The rank cut-off of iso (N13) belongs to the SVD backend.
    """

    lr: float
    momentum: float
    heloco: bool
    equal_weights: bool


@dataclass(frozen=True, slots=True)
class MergeJob:
    """Owned inputs of one round; nothing in it is modified.

    Attributes:
        fragment: mode, sizes and shapes.
        dtype: session dtype of the payloads.
        responses: in (learner_id, generation) order (N2), at least one.
        params: f32, shape (numel,).
        momentum: f32, shape (numel,).
    """

    fragment: NumericFragment
    dtype: DType
    responses: tuple[Response, ...]
    params: Tensor
    momentum: Tensor
    settings: MergeSettings


@dataclass(frozen=True, slots=True)
class MergeResult:
    """New tensors of the fragment and what the tape tells about the merge.

    Attributes:
        params: f32, shape (numel,), new memory.
        momentum: f32, shape (numel,), new memory.
        gnorm: f64 L2 norm of the merged gradient before the outer step (N20).
        weights: w_m per response, in their order (N5).
    """

    params: Tensor
    momentum: Tensor
    gnorm: float
    weights: tuple[float, ...]
