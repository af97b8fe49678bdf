"""One round's merge, end to end: decode, correct, merge, outer step (N4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from syncer.events import Member
from syncer.merge.weights import learner_weight
from wire.dtypes import DType
from wire.layout import MergeMode, NumericFragment
from wire.messages import Buffer
from wire.tensors import decode, representable


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


def merge_round(job: MergeJob, svd: SvdBackend) -> MergeResult:
    """Merge one round (N4): decode, negate, correct, merge, outer step.

    Raises:
        NonFiniteMerge: N23; nothing was written.
    """
    settings = job.settings
    weights = tuple(
        learner_weight(r.c_tokens, r.c_steps, settings.equal_weights) for r in job.responses
    )
    numel = job.fragment.numel
    grads = [-decode(r.payload, job.dtype, numel) for r in job.responses]
    merged = torch.empty(numel)
    at = 0
    for size in job.fragment.numels:
        part = slice(at, at + size)
        slices = [grad[part] for grad in grads]
        if settings.heloco:
            slices = [correct(grad, job.momentum[part]) for grad in slices]
        merge = radial if job.fragment.mode is MergeMode.RDA else average
        merged[part] = merge(slices, weights)
        at += size
    if job.fragment.shapes is not None and bool(merged.isfinite().all()):
        matrices = [
            part.reshape(shape)
            for part, shape in zip(
                torch.split(merged, list(job.fragment.numels)), job.fragment.shapes, strict=True
            )
        ]
        merged = torch.cat([matrix.reshape(-1) for matrix in svd.flatten(matrices)])
    gnorm = norm(merged)
    params, momentum = nesterov(job.params, job.momentum, merged, settings.lr, settings.momentum)
    finite = math.isfinite(gnorm) and representable(momentum, DType.F32)
    if not (finite and representable(params, job.dtype.bulk)):
        norms = [norm(grad) for grad in grads]
        raise NonFiniteMerge(job.responses[norms.index(max(norms))].member)
    return MergeResult(params, momentum, gnorm, weights)


def norm(values: Tensor) -> float:
    """f64 L2 norm (N3)."""
    return float(values.double().square().sum().sqrt())


def average(grads: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean (N7)."""
    out = torch.zeros_like(grads[0])
    total = 0.0
    for weight in weights:
        total += weight
    if total:
        for grad, weight in zip(grads, weights, strict=True):
            out += grad * torch.tensor(weight / total, dtype=torch.float32)
    return out


def radial(grads: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted radial/directional average (N8 to N11)."""
    total = 0.0
    for weight in weights:
        total += weight
    out = torch.zeros_like(grads[0])
    if not total:
        return out
    norms = [norm(grad) for grad in grads]
    radius = 0.0
    for length, weight in zip(norms, weights, strict=True):
        radius += length * weight
    radius /= total
    for grad, length, weight in zip(grads, norms, weights, strict=True):
        if length:
            out += scale(weight / total / length, grad)
    direction = norm(out)
    if direction < 1e-12:
        return average(grads, weights)
    return scale(radius / direction, out)


def scale(factor: float, values: Tensor) -> Tensor:
    """f32 product, exact where an f32 factor would overflow or lose bits (N10)."""
    single = torch.tensor(factor, dtype=torch.float32)
    if bool(single.isfinite()) and abs(float(single)) >= 2.0**-126:
        return values * single
    return (values.double() * factor).float()


def correct(grad: Tensor, momentum: Tensor) -> Tensor:
    """Directional correction of one gradient slice (N15, N16)."""
    nd, nm = norm(grad), norm(momentum)
    if nd < 1e-8 or nm < 1e-8:
        return grad
    cosine = float((grad.double() * momentum.double()).sum()) / (nd * nm)
    if cosine >= 0.2:
        return grad
    confidence = nd / (nd + 3.0 * nm + 1e-8)
    if cosine < 0:
        beta = min(0.5 * -cosine * confidence, 0.5)
        return grad + momentum * torch.tensor(-beta * cosine * nd / nm, dtype=torch.float32)
    rate = min(1.0 * (1 - cosine) * confidence, 1.0)
    turned = ((1 - rate) / nd) * grad.double() + (rate / nm) * momentum.double()
    length = float(turned.square().sum().sqrt())
    return turned.float() * torch.tensor(nd / max(length, 1e-8), dtype=torch.float32)


def nesterov(
    params: Tensor, buffer: Tensor, grad: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """Outer step with single-rounded operations in the order of N18."""
    mu = torch.tensor(momentum, dtype=torch.float32)
    rate = torch.tensor(lr, dtype=torch.float32)
    new_buffer = buffer * mu + grad
    return params - (grad + new_buffer * mu) * rate, new_buffer
