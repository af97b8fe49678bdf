"""Building merge jobs in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from syncer.events import Member
from syncer.merge.engine import merge_round
from syncer.merge.plan import MergeJob, MergeResult, MergeSettings, Response
from syncer.svd.scalar import ScalarSvd
from wire.dtypes import DType
from wire.layout import MergeMode, NumericFragment
from wire.tensors import encode

Array = np.ndarray


def floats(values: object) -> Array:
    return np.array(values, np.float32).reshape(-1)


def bits(values: object) -> list[int]:
    return np.asarray(values, np.float32).view(np.uint32).tolist()


def make_job(
    grads: Sequence[Array],
    *,
    mode: MergeMode = MergeMode.AVG,
    weights: Sequence[int] | None = None,
    numels: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    dtype: DType = DType.F32,
    params: Array | None = None,
    momentum: Array | None = None,
    lr: float = 1.0,
    mu: float = 0.0,
    heloco: bool = False,
    equal: bool = False,
) -> MergeJob:
    """A job whose outer gradients are `grads`; weight w comes as w tokens in w steps (N5)."""
    numel = len(grads[0])
    fragment = NumericFragment(
        mode, tuple(numels or (numel,)), None if shapes is None else tuple(shapes), numel
    )
    counts = list(weights) if weights is not None else [1] * len(grads)
    responses = tuple(
        Response(Member(number, 7), bytearray(encode(torch.from_numpy(-g), dtype)), w, max(w, 1))
        for number, (g, w) in enumerate(zip(grads, counts, strict=True))
    )
    zeros = np.zeros(numel, np.float32)
    return MergeJob(
        fragment,
        dtype,
        responses,
        torch.from_numpy(zeros.copy() if params is None else params),
        torch.from_numpy(zeros.copy() if momentum is None else momentum),
        MergeSettings(lr, mu, heloco, equal),
    )


def run(job: MergeJob, threads: int | None = None) -> MergeResult:
    return merge_round(job, ScalarSvd(), threads)


def merged(job: MergeJob) -> Array:
    """The merged gradient of a job with lr 1 and mu 0: the new momentum is just that (N18)."""
    return run(job).momentum.numpy()
