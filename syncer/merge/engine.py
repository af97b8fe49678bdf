"""The passes of one merge over its fragment (N4), with as few reads as the mode allows.

avg reads every payload once and writes the result in the same pass. rda needs norms before it can
average, and the norm of the average before it can scale: two reads, three passes. The correction
needs norms and dot products first: one more read, and for rda the norms of what it changed.
The passes go tensor by tensor (small ones together), so that a later pass finds the data in cache.

All arithmetic is done on the learner deltas as sent; the sign of W56 is applied where they are
accumulated, since negation is exact and commutes with every rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np
import torch

from syncer.merge import kernels
from syncer.merge.blocks import Block, Floats, Workers, available_cores, groups
from syncer.merge.correction import Damp, Rotate, correction
from syncer.merge.kernels import Readable
from syncer.merge.memory import ResultMemory
from syncer.merge.plan import MergeJob, MergeResult, NonFiniteMerge, SvdBackend
from syncer.merge.scaling import ONE, Coefficient, plain, safe, single
from syncer.merge.weights import learner_weight
from wire.dtypes import DType
from wire.layout import MergeMode
from wire.messages import Buffer
from wire.tensors import BF16_OVERFLOW, decode_into

SMALLEST_DIRECTION = 1e-12
"""Below this norm the mean direction means nothing and avg is used (N11)."""


def merge_round(
    job: MergeJob,
    svd: SvdBackend,
    threads: int | None = None,
    memory: ResultMemory | None = None,
) -> MergeResult:
    """Merge one round (N4): decode, negate, correct, merge, outer step.

    Blocks the calling thread. Beyond the payloads it takes two f32 fragments (the new parameters
    and momentum) and a block per thread; iso also takes what its SVD needs.

    Args:
        job: inputs, not modified.
        svd: backend for iso fragments.
        threads: how many cores to use, None for all of this process; never shows in the result.
        memory: where the results come from; None takes fresh memory.

    Raises:
        NonFiniteMerge: N23; nothing was written.
    """
    weights = tuple(
        learner_weight(response.c_tokens, response.c_steps, job.settings.equal_weights)
        for response in job.responses
    )
    with Workers(threads or available_cores()) as workers:
        merge = FragmentMerge(job, weights, workers, memory or ResultMemory())
        gnorm = merge.run(svd)
        if gnorm is None:
            raise NonFiniteMerge(job.responses[merge.largest()].member)
    return MergeResult(
        torch.from_numpy(merge.new_params), torch.from_numpy(merge.delta), gnorm, weights
    )


@dataclass(slots=True)
class Term:
    """How one response enters the merge of one tensor.

    Attributes:
        response: its number.
        norm: f64 norm of the corrected gradient; measured only where something needs it.
        correction: what N15 does to it.
    """

    response: int
    norm: float = 0.0
    correction: Damp | Rotate | None = None


Terms = dict[int, list[Term]]
"""The terms of each tensor of a group."""
Weighted = list[tuple[Term, Coefficient]]
"""Terms of one tensor with their coefficients."""


class FragmentMerge:
    """One merge; `run` once.

    Args:
        job: inputs, not modified.
        weights: w_m in response order (N5).
        workers: threads.
        memory: for `delta` and `new_params`.

    Attributes:
        delta: the merged gradient, after `run` the new momentum.
        new_params: after `run` the new parameters.
    """

    def __init__(
        self, job: MergeJob, weights: Sequence[float], workers: Workers, memory: ResultMemory
    ) -> None:
        self._job = job
        self._weights = weights
        self._total = _sum(weights)
        self._workers = workers
        self._params: Floats = job.params.numpy()
        self._momentum: Floats = job.momentum.numpy()
        self._sources = [_readable(response.payload, job.dtype) for response in job.responses]
        self._lr = single(job.settings.lr)
        self._mu = single(job.settings.momentum)
        self._limit = BF16_OVERFLOW if job.dtype.bulk is DType.BF16 else np.float32(np.inf)
        self.delta: Floats = memory.take(job.fragment.numel)
        self.new_params: Floats = memory.take(job.fragment.numel)

    def run(self, svd: SvdBackend) -> float | None:
        """Merge and take the outer step.

        Returns:
            f64 norm of the merged gradient (N20); None when N23 refuses the round.
        """
        fragment = self._job.fragment
        merge = {
            MergeMode.AVG: self._merge_average,
            MergeMode.RDA: self._merge_radial,
            MergeMode.ISO: self._merge_isotropic,
        }[fragment.mode]
        squares: list[float] = []
        for group in groups(fragment.numels):
            squares += merge(group, self._measure(group))
        if fragment.shapes is not None and isfinite(_sum(squares)):
            self._flatten(fragment.shapes, svd)
            squares = self._workers.run(lambda block, _: self._step(block, ONE), self._blocks())
        norm = sqrt(_sum(squares))
        return norm if isfinite(norm) else None

    def largest(self) -> int:
        """Number of the response with the largest gradient norm, the first of equals (C34)."""
        terms = [Term(response) for response in range(len(self._weights))]

        def squares(block: Block, scratch: Floats) -> list[float]:
            return [kernels.sum_of_squares(self._load(block, term, scratch)) for term in terms]

        partials = self._workers.run(squares, self._blocks())
        sums = [_sum(column) for column in zip(*partials, strict=True)]
        return sums.index(max(sums))

    def _blocks(self) -> list[Block]:
        return [block for group in groups(self._job.fragment.numels) for block in group]

    def _merge_average(self, group: Sequence[Block], terms: Terms) -> list[float]:
        """avg (N7) and the outer step in one pass; squares of the gradient by block."""

        shares = self._plain_shares(terms)

        def work(block: Block, scratch: Floats) -> float:
            self._accumulate(block, shares[block.tensor], scratch)
            return self._step(block, ONE)

        return self._workers.run(work, group)

    def _merge_isotropic(self, group: Sequence[Block], terms: Terms) -> list[float]:
        """The average of iso (N12), before its SVD; its squares by block."""

        shares = self._plain_shares(terms)

        def work(block: Block, scratch: Floats) -> float:
            return kernels.sum_of_squares(self._accumulate(block, shares[block.tensor], scratch))

        return self._workers.run(work, group)

    def _merge_radial(self, group: Sequence[Block], terms: Terms) -> list[float]:
        """rda (N8 to N11) and the outer step; squares of the gradient by block."""
        directions: dict[int, Weighted] = {
            tensor: [
                (term, safe(self._share(term) / term.norm)) for term in of_tensor if term.norm != 0
            ]
            for tensor, of_tensor in terms.items()
        }

        def direct(block: Block, scratch: Floats) -> tuple[float]:
            out = self._accumulate(block, directions[block.tensor], scratch)
            return (kernels.sum_of_squares(out),)

        shares = self._plain_shares(terms)
        factors: dict[int, Coefficient] = {}
        for tensor, (squares,) in _by_tensor(group, self._workers.run(direct, group)).items():
            length = sqrt(squares)
            if not length < SMALLEST_DIRECTION:
                radius = _sum(t.norm * self._weights[t.response] for t in terms[tensor])
                factors[tensor] = safe(radius / self._total / length)

        def finish(block: Block, scratch: Floats) -> float:
            factor = factors.get(block.tensor)
            if factor is None:
                self._accumulate(block, shares[block.tensor], scratch)
            return self._step(block, factor or ONE)

        return self._workers.run(finish, group)

    def _measure(self, group: Sequence[Block]) -> Terms:
        """Norms and corrections of each response in each tensor (N8, N15)."""
        count = len(self._weights)
        terms = {block.tensor: [Term(response) for response in range(count)] for block in group}
        heloco = self._job.settings.heloco
        radial = self._job.fragment.mode is MergeMode.RDA
        if not heloco and not radial:
            return terms

        def moments(block: Block, scratch: Floats) -> list[float]:
            momentum = self._momentum[block.span]
            sums = [kernels.sum_of_squares(momentum) if heloco else 0.0]
            for term in terms[block.tensor]:
                delta = self._load(block, term, scratch)
                sums += (
                    kernels.moments(delta, momentum)
                    if heloco
                    else (kernels.sum_of_squares(delta), 0.0)
                )
            return sums

        for tensor, sums in _by_tensor(group, self._workers.run(moments, group)).items():
            momentum = sqrt(sums[0])
            for term, squares, dot in zip(terms[tensor], sums[1::2], sums[2::2], strict=True):
                term.norm = sqrt(squares)
                # The delta is -g, so its dot product has the other sign (W56).
                term.correction = correction(term.norm, momentum, -dot)
        if radial:
            self._measure_corrected(group, terms)
        return terms

    def _measure_corrected(self, group: Sequence[Block], terms: Terms) -> None:
        """Norms again, of the gradients that the correction changed (N4: rda sees those)."""
        changed = {
            tensor: [term for term in of_tensor if term.correction is not None]
            for tensor, of_tensor in terms.items()
        }

        def norms(block: Block, scratch: Floats) -> list[float]:
            return [
                kernels.sum_of_squares(self._load(block, term, scratch))
                for term in changed[block.tensor]
            ]

        blocks = [block for block in group if changed[block.tensor]]
        for tensor, sums in _by_tensor(blocks, self._workers.run(norms, blocks)).items():
            for term, squares in zip(changed[tensor], sums, strict=True):
                term.norm = sqrt(squares)

    def _flatten(self, shapes: Sequence[tuple[int, int]], svd: SvdBackend) -> None:
        """Replace the averages in `delta` by their flattened matrices (N12)."""
        parts = torch.split(torch.from_numpy(self.delta), list(self._job.fragment.numels))
        # A shape that does not fit leaves the average as it is (N14).
        fitting = [
            (part, part.view(shape))
            for part, shape in zip(parts, shapes, strict=True)
            if part.numel() == shape[0] * shape[1]
        ]
        flat = svd.flatten([matrix for _, matrix in fitting])
        for (part, _), matrix in zip(fitting, flat, strict=True):
            part.copy_(matrix.reshape(-1))

    def _step(self, block: Block, factor: Coefficient) -> float:
        """Scale the merged gradient of one block and take the outer step (N18).

        Returns:
            Sum of squares of the scaled gradient; infinite when the new state is refused (N23).
        """
        delta = self.delta[block.span]
        if factor is not ONE:
            factor.multiply(delta)
        squares = kernels.sum_of_squares(delta)
        legal = kernels.outer_step(
            delta,
            self._momentum[block.span],
            self._params[block.span],
            self.new_params[block.span],
            self._lr,
            self._mu,
            self._limit,
        )
        return squares if legal else inf

    def _plain_shares(self, terms: Terms) -> dict[int, Weighted]:
        """The coefficients of avg (N7)."""
        return {
            tensor: [(term, plain(self._share(term))) for term in of_tensor]
            for tensor, of_tensor in terms.items()
        }

    def _accumulate(self, block: Block, terms: Weighted, scratch: Floats) -> Floats:
        """Sum of coefficient times corrected gradient of one block, written to `delta`."""
        out = self.delta[block.span]
        out.fill(0)
        at = 0
        while at < len(terms):
            four = self._in_place(terms[at : at + 4], block)
            if len(four) == 4:
                factors = tuple(coefficient.rounded for _, coefficient in terms[at : at + 4])
                kernels.subtract_four(out, factors, four)
                at += 4
            else:
                term, coefficient = terms[at]
                coefficient.subtract(out, self._load(block, term, scratch))
                at += 1
        return out

    def _in_place(self, terms: Weighted, block: Block) -> tuple[Readable, ...]:
        """The blocks of those terms that need neither decoding nor correction nor f64 products."""
        return tuple(
            source[block.span]
            for term, coefficient in terms
            if (source := self._sources[term.response]) is not None
            and term.correction is None
            and not coefficient.wide
        )

    def _load(self, block: Block, term: Term, scratch: Floats) -> Readable:
        """One block of a learner delta, corrected; in `scratch` unless it can be read in place."""
        source = self._sources[term.response]
        if source is None:
            payload = self._job.responses[term.response].payload
            decode_into(payload, self._job.dtype, block.first, scratch)
            delta: Readable = scratch
        else:
            delta = source[block.span]
        if term.correction is None:
            return delta
        term.correction.apply(scratch, delta, self._momentum[block.span])
        return scratch

    def _share(self, term: Term) -> float:
        """w / W, and 0 for all when W is 0 (N6)."""
        return self._weights[term.response] / self._total if self._total else 0.0


def _readable(payload: Buffer, dtype: DType) -> Readable | None:
    """A payload that the compiled loops can read where it lies.

    One at an odd address or in read-only memory would be another type to compile for.
    """
    if dtype is DType.Q4:
        return None
    array: Readable
    if dtype is DType.F32:
        array = np.frombuffer(payload, np.float32)
    else:
        array = np.frombuffer(payload, np.uint16)
    return array if array.flags.behaved else None


def _by_tensor(
    blocks: Sequence[Block], partials: Sequence[Sequence[float]]
) -> dict[int, list[float]]:
    """Sums of the columns of `partials` over the blocks of each tensor, left to right (N3)."""
    sums: dict[int, list[float]] = {}
    for block, row in zip(blocks, partials, strict=True):
        known = sums.get(block.tensor)
        sums[block.tensor] = (
            list(row) if known is None else [a + b for a, b in zip(known, row, strict=True)]
        )
    return sums


def _sum(values: Iterable[float]) -> float:
    """f64 sum strictly left to right (N3); `sum` compensates from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
