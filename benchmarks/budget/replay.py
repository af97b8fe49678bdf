"""The consolidation computed once more, from what the learners froze; no I/O.

A learner answers `frozen_local - resumed_global` (L42). With the frozen parameters and the cutoff
checkpoint at hand every push can be made again, and with them every merge: the result must be
the final checkpoint. This proves the payloads, which no tape shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.budget.plan import Arm, Expected
from checkpoint.snapshot import FragmentState
from syncer.events import Member
from syncer.merge.engine import merge_round
from syncer.merge.plan import MergeJob, MergeSettings, Response
from syncer.svd.scalar import ScalarSvd
from wire.dtypes import DType
from wire.layout import NamedFragment, NamedLayout
from wire.tensors import decode, encode

TOLERANCE = 1e-6
"""Relative L2 distance; an SVD may differ in the last bits from one process to the next."""
_DTYPES = {"f32": DType.F32, "bf16": DType.BF16, "q4": DType.Q4}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the final checkpoint is from the replay.

    Attributes:
        relative: largest relative L2 distance over params and momentum of all fragments.
        bits_equal: not even one bit differs.
    """

    relative: float
    bits_equal: bool


def replay(
    before: Sequence[FragmentState],
    frozen: Sequence[Mapping[str, Tensor]],
    layout: NamedLayout,
    arm: Arm,
    expected: Expected,
) -> list[FragmentState]:
    """The F rounds of the consolidation.

    Args:
        before: the cutoff checkpoint.
        frozen: per learner id, name -> f32 tensor.
        layout: of the learners.
        arm: how the syncers merged.
        expected: budget and token count of each learner.

    Returns:
        Params and momentum of every fragment; versions are left as they were.
    """
    settings = MergeSettings(
        lr=arm.outer_lr, momentum=arm.outer_momentum, heloco=arm.heloco, equal_weights=False
    )
    dtype = _DTYPES[arm.dtype]
    after = []
    for index, (state, fragment) in enumerate(zip(before, layout.fragments, strict=True)):
        pushes = [
            Response(Member(learner, 1), push, expected.tokens, expected.steps)
            for learner, push in enumerate(_pushes(state, frozen, fragment, dtype))
        ]
        job = MergeJob(
            fragment=layout.numeric.fragments[index],
            dtype=dtype,
            responses=tuple(pushes),
            params=state.params,
            momentum=state.momentum,
            settings=settings,
        )
        result = merge_round(job, ScalarSvd())
        after.append(FragmentState(state.version, result.params, result.momentum))
    return after


def _pushes(
    state: FragmentState,
    frozen: Sequence[Mapping[str, Tensor]],
    fragment: NamedFragment,
    dtype: DType,
) -> Iterable[memoryview]:
    """What each learner sends: its frozen values minus the broadcast as it was received."""
    received = decode(encode(state.params, dtype.bulk), dtype.bulk, state.params.numel())
    for tensors in frozen:
        local = torch.cat([tensors[tensor.name].flatten() for tensor in fragment.tensors])
        yield encode(local - received, dtype)


def compare(replayed: Sequence[FragmentState], found: Sequence[FragmentState]) -> Difference:
    """How far two states of one layout are apart."""
    pairs = [
        pair
        for ours, theirs in zip(replayed, found, strict=True)
        for pair in ((ours.params, theirs.params), (ours.momentum, theirs.momentum))
    ]
    return Difference(
        relative=max(_distance(ours, theirs) for ours, theirs in pairs),
        bits_equal=all(
            torch.equal(ours.view(torch.int32), theirs.view(torch.int32)) for ours, theirs in pairs
        ),
    )


def check_replay(difference: Difference) -> list[str]:
    """The violation, if the final checkpoint is not what the frozen parameters lead to."""
    if difference.relative <= TOLERANCE:
        return []
    return [
        f"L42: the final checkpoint is {difference.relative:.3g} (relative) away from merging "
        "frozen_local - resumed_global of every learner"
    ]


def check_frozen(states: Sequence[tuple[int, int]], expected: Expected) -> list[str]:
    """Every learner froze after exactly its budget; `states` are (local step, units) by id."""
    return [
        f"L40: learner {learner} froze after {steps} steps and {units} tokens, its budget is "
        f"{expected.steps} and {expected.tokens}"
        for learner, (steps, units) in enumerate(states)
        if (steps, units) != (expected.steps, expected.tokens)
    ]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(ours, dtype=torch.float64))
    apart = float(torch.linalg.vector_norm(ours.double() - theirs.double()))
    return apart / scale if scale else apart
