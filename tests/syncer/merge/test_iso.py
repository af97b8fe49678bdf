"""iso: spectral flattening of the average (N12 to N14)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncer.merge.engine import merge_round
from syncer.merge.plan import NonFiniteMerge
from syncer.svd.flatten import flatten_matrix
from syncer.svd.scalar import ScalarSvd
from tests.syncer.merge import oracle
from tests.syncer.merge.rounds import bits, floats, make_job, merged
from wire.layout import MergeMode


def matrix(rows: int, cols: int, seed: int, ratio: float = 1e-2) -> np.ndarray:
    """Random, with singular values from 1 down to `ratio`."""
    generator = np.random.default_rng(seed)
    k = min(rows, cols)
    u = np.linalg.qr(generator.standard_normal((rows, k)))[0]
    v = np.linalg.qr(generator.standard_normal((cols, k)))[0]
    return (u * np.geomspace(1, ratio, k) @ v.T).astype(np.float32)


def flat(values: np.ndarray, cutoff: float | None = None) -> np.ndarray:
    return flatten_matrix(torch.from_numpy(values), cutoff).numpy()


def assert_flat(result: np.ndarray, mean: float, rank: int) -> None:
    """N26: rank = number of kept directions, kept singular values all the mean."""
    s = np.linalg.svd(result.astype(np.float64), compute_uv=False)
    assert np.abs(s[:rank] / mean - 1).max() < 1e-5
    assert (s[rank:] < 1e-5 * mean).all()


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000), st.floats(-20, 20))
def test_any_shape_against_the_oracle(rows: int, cols: int, seed: int, size: float) -> None:
    """N26: 1e-6 of the mean singular value for s_min / s_max >= 1e-3."""
    values = (matrix(rows, cols, seed) * 10.0**size).astype(np.float32)
    mean = np.linalg.svd(values.astype(np.float64), compute_uv=False).mean()
    ref = oracle.iso(values.reshape(-1), rows, cols)
    assert np.abs(flat(values).reshape(-1).astype(np.float64) - ref).max() <= 1e-6 * mean


def test_average_then_flatten_by_tensor() -> None:
    """N12: each matrix of the weighted average by itself, with its own shape."""
    a, b = matrix(4, 6, 1), matrix(5, 3, 2)
    grads = [
        np.concatenate([a.reshape(-1), b.reshape(-1)]),
        np.concatenate([-2 * a, a]).reshape(-1)[:39],
    ]
    job = make_job(
        grads, mode=MergeMode.ISO, weights=[3, 1], numels=[24, 15], shapes=[(4, 6), (5, 3)]
    )
    average = oracle.avg(grads, [3, 1])
    ref = np.concatenate([oracle.iso(average[:24], 4, 6), oracle.iso(average[24:], 5, 3)])
    assert np.abs(merged(job) - ref).max() < 1e-6


def test_a_low_rank_matrix_keeps_its_rank() -> None:
    """N13: noise of f32 below the cut-off is not blown up; zeros count in the mean (N12)."""
    generator = np.random.default_rng(0)
    low = (generator.standard_normal((8, 2)) @ generator.standard_normal((2, 6))).astype(np.float32)
    s = np.linalg.svd(low.astype(np.float64), compute_uv=False)
    assert_flat(flat(low), s.mean(), 2)


def test_the_cutoff_option_replaces_the_default() -> None:
    values = np.diag([1.0, 0.5, 0.01]).astype(np.float32)
    mean = (1 + 0.5 + 0.01) / 3
    assert_flat(flat(values), mean, 3)
    assert_flat(flat(values, 0.1), mean, 2)
    assert_flat(flat(values, 0.5), mean, 1)  # s > c * s_max, not >=


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
def test_vectors_come_back_unchanged(shape: tuple[int, int]) -> None:
    """N14, up to rounding."""
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    assert np.abs(flat(values) - values).max() < 1e-6


def test_zero_and_constant_matrices() -> None:
    """N12, N25."""
    assert bits(flat(np.zeros((3, 4), np.float32)).reshape(-1)) == [0] * 12
    constant = np.full((4, 4), 2.0, np.float32)
    assert np.abs(flat(constant) - constant / 4).max() < 1e-6


class Recorder:
    """A backend that notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, ...]]] = []

    def flatten(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        self.calls.append([tuple(m.shape) for m in matrices])
        return ScalarSvd().flatten(matrices)


def test_all_matrices_of_a_round_are_submitted_together() -> None:
    """N32."""
    backend = Recorder()
    job = make_job([floats(range(10))], mode=MergeMode.ISO, numels=[6, 4], shapes=[(2, 3), (2, 2)])
    merge_round(job, backend)
    assert backend.calls == [[(2, 3), (2, 2)]]


def test_a_non_finite_average_never_reaches_the_svd() -> None:
    """N12."""
    backend = Recorder()
    big = 3.4028234663852886e38
    job = make_job(
        [floats([big, -big])],
        mode=MergeMode.ISO,
        shapes=[(1, 2)],
        momentum=floats([1e30, 3e30]),
        heloco=True,
    )
    with pytest.raises(NonFiniteMerge):
        merge_round(job, backend)
    assert backend.calls == []


def test_a_shape_that_does_not_fit_leaves_the_average() -> None:
    """N14."""
    job = make_job([floats([3, 4])], mode=MergeMode.ISO, shapes=[(3, 5)])
    assert merged(job).tolist() == [3, 4]
