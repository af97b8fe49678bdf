"""Loads the compiled loops of the merge before the first round needs them.

They are compiled once per machine and loaded once per process: a second or a few that would
otherwise be the first round's.
"""

from __future__ import annotations

import torch

from syncer.events import Member
from syncer.merge.engine import merge_round
from syncer.merge.plan import MergeJob, MergeSettings, Response
from syncer.svd.scalar import ScalarSvd
from wire.dtypes import DType
from wire.layout import MergeMode, numeric_fragment
from wire.tensors import encode

NUMEL = 512


def warm_up(dtype: DType, modes: frozenset[MergeMode], heloco: bool) -> None:
    """Merge small fragments of each mode, in the session's dtype; blocks.

    Gradients point away from the momentum and from each other, so that every branch of the
    correction that is compiled is met; five of them, since four are summed by a loop of their own.
    """
    ramp = torch.linspace(-1.0, 1.0, NUMEL)
    for mode in modes - {MergeMode.ISO}:  # iso is torch's own code
        for first in (ramp, -ramp, ramp.flip(0).abs()):
            merge_round(_job(dtype, mode, heloco, (first, ramp, ramp, ramp, ramp)), ScalarSvd())


def _job(dtype: DType, mode: MergeMode, heloco: bool, deltas: tuple[torch.Tensor, ...]) -> MergeJob:
    return MergeJob(
        fragment=numeric_fragment(mode, [NUMEL]),
        dtype=dtype,
        responses=tuple(
            Response(Member(index, 1), encode(delta, dtype), 16, 1)
            for index, delta in enumerate(deltas)
        ),
        params=torch.zeros(NUMEL),
        momentum=torch.linspace(1.0, -1.0, NUMEL),
        settings=MergeSettings(lr=0.5, momentum=0.5, heloco=heloco, equal_weights=True),
    )
