"""Merges against the oracle, within the bounds of N26, and the cases of N25."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncer.merge import blocks
from tests.syncer.merge import oracle
from tests.syncer.merge.rounds import bits, floats, make_job, merged, run
from wire.dtypes import DType
from wire.layout import MergeMode
from wire.tensors import decode

LARGE = blocks.GROUP + blocks.BLOCK + 17
"""More than one group, more than one block, a tail."""


@st.composite
def rounds(draw: st.DrawFn, scales: tuple[int, int] = (-30, 30)) -> tuple[list, list, list]:
    """Gradients of 1 to 9 responders, weights over 12 orders of magnitude, tensor sizes."""
    numels = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    count = draw(st.integers(1, 9))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    grads = []
    for _ in range(count):
        exponent = draw(st.integers(*scales))
        grad = generator.standard_normal(sum(numels)) * 10.0**exponent
        if draw(st.booleans()):
            grad[: numels[0]] = 0
        grads.append(grad.astype(np.float32))
    weights = [10 ** draw(st.integers(0, 12)) for _ in range(count)]
    return grads, weights, numels


def by_tensor(function, grads: list, weights: list, numels: list) -> list[np.ndarray]:
    edges = np.cumsum(numels)[:-1]
    parts = [np.split(g, edges) for g in grads]
    return [function([p[i] for p in parts], weights) for i in range(len(numels))]


def assert_close_to_rda(result: np.ndarray, grads: list, weights: list, numels: list) -> None:
    """N26: 2^-21 * max(abs(ref)) / min(1, d) for each tensor."""
    references = by_tensor(oracle.rda, grads, weights, numels)
    lengths = [oracle.norm(d) for d in by_tensor(oracle.direction, grads, weights, numels)]
    for part, ref, d in zip(
        np.split(result, np.cumsum(numels)[:-1]), references, lengths, strict=True
    ):
        bound = 2.0**-21 * np.abs(ref).max() / min(1.0, d or 1.0)
        assert np.abs(part.astype(np.float64) - ref).max() <= bound


@given(rounds())
def test_avg_is_bit_exact(case: tuple) -> None:
    """N7, N26."""
    grads, weights, numels = case
    job = make_job(grads, weights=weights, numels=numels)
    assert bits(merged(job)) == bits(oracle.avg(grads, weights))


@given(rounds())
def test_rda_stays_within_its_bound(case: tuple) -> None:
    grads, weights, numels = case
    job = make_job(grads, mode=MergeMode.RDA, weights=weights, numels=numels)
    lengths = by_tensor(oracle.direction, grads, weights, numels)
    # Around d = 1e-12 the two sides may take different branches of N11.
    assume(all(not 1e-13 < oracle.norm(d) < 1e-11 for d in lengths))
    assert_close_to_rda(merged(job), grads, weights, numels)


@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
@pytest.mark.parametrize("dtype", list(DType))
def test_a_large_fragment(mode: MergeMode, dtype: DType) -> None:
    """Groups, blocks and tails, in every dtype."""
    generator = np.random.default_rng(3)
    sent = [generator.standard_normal(LARGE).astype(np.float32) * 0.01 for _ in range(3)]
    weights, numels = [5, 1, 3], [LARGE - 500, 499, 1]
    job = make_job(sent, mode=mode, weights=weights, numels=numels, dtype=dtype)
    grads = [-decode(r.payload, dtype, LARGE).numpy() for r in job.responses]
    if mode is MergeMode.AVG:
        assert bits(merged(job)) == bits(oracle.avg(grads, weights))
    else:
        assert_close_to_rda(merged(job), grads, weights, numels)


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-38, 1e-30, 1e30, 1e38])
def test_rda_of_extreme_norms(scale: float) -> None:
    """N10: neither tiny nor huge gradients overflow or vanish."""
    generator = np.random.default_rng(5)
    base = np.clip(generator.standard_normal(100), -3, 3).astype(np.float32)
    grads = [base * np.float32(scale), base[::-1] * np.float32(scale)]
    job = make_job(grads, mode=MergeMode.RDA, weights=[2, 1])
    result = merged(job)
    assert_close_to_rda(result, grads, [2, 1], [100])
    assert np.isfinite(result).all()
    assert result.any()


def test_rda_of_one_responder_is_the_identity_up_to_rounding() -> None:
    """N11."""
    grad = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    result = merged(make_job([grad], mode=MergeMode.RDA))
    assert np.abs(result / grad - 1).max() < 3e-7


def test_rda_of_opposite_gradients_is_their_average() -> None:
    """N11: d < 1e-12 -> avg, bit for bit; the weights make the average differ from zero."""
    grad = floats([1.0, -2.0, 0.5, 3.0])
    job = make_job([grad, -2 * grad], mode=MergeMode.RDA, weights=[1, 1])
    assert bits(merged(job)) == bits(oracle.avg([grad, -2 * grad], [1, 1]))
    assert merged(job).any()


@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
def test_zeros_stay_zeros(mode: MergeMode) -> None:
    job = make_job([np.zeros(300, np.float32)] * 2, mode=mode, numels=[299, 1])
    result = run(job)
    assert not result.momentum.any()
    assert result.gnorm == 0.0


def test_rda_counts_the_weight_of_a_zero_gradient() -> None:
    """N8: r is a mean over all weights; N9: the direction is not."""
    grad = floats([3.0, 4.0])
    result = merged(make_job([grad, floats([0, 0])], mode=MergeMode.RDA, weights=[1, 3]))
    assert np.linalg.norm(result) == pytest.approx(5.0 / 4, rel=1e-6)


@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
def test_total_weight_zero_gives_zeros(mode: MergeMode) -> None:
    """N6: as a pure function; the coordinator never commits such a round."""
    result = run(make_job([floats([1, 2]), floats([3, 4])], mode=mode, weights=[0, 0]))
    assert result.momentum.tolist() == [0, 0]
    assert result.weights == (0.0, 0.0)


def test_weights_are_reported_in_response_order() -> None:
    grads = [floats([1.0]), floats([2.0]), floats([3.0])]
    assert run(make_job(grads, weights=[4, 0, 9])).weights == (4.0, 0.0, 9.0)
    assert run(make_job(grads, weights=[4, 0, 9], equal=True)).weights == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
def test_every_tensor_is_merged_by_itself(mode: MergeMode) -> None:
    """N2: a huge tensor beside a small one does not change its direction."""
    generator = np.random.default_rng(9)
    small = [generator.standard_normal(5).astype(np.float32) for _ in range(2)]
    huge = [generator.standard_normal(7).astype(np.float32) * 1e6 for _ in range(2)]
    together = merged(
        make_job(
            [np.concatenate(p) for p in zip(small, huge, strict=True)], mode=mode, numels=[5, 7]
        )
    )
    alone = merged(make_job(small, mode=mode))
    assert bits(together[:5]) == bits(alone)


def test_gnorm_is_the_norm_of_the_merged_gradient() -> None:
    """N20, before the outer step."""
    generator = np.random.default_rng(2)
    grads = [generator.standard_normal(LARGE).astype(np.float32) for _ in range(2)]
    for mode in (MergeMode.AVG, MergeMode.RDA):
        job = make_job(grads, mode=mode, numels=[LARGE - 3, 3])
        result = run(job)
        assert result.gnorm == pytest.approx(oracle.norm(result.momentum.numpy()), rel=1e-12)


def test_plain_averaging() -> None:
    """lr 1, mu 0, f32, avg: parameters minus the mean gradient in learner order, bit for bit."""
    generator = np.random.default_rng(4)
    params = generator.standard_normal(5000).astype(np.float32)
    deltas = [generator.standard_normal(5000).astype(np.float32) * 0.01 for _ in range(3)]
    job = make_job([-d for d in deltas], params=params.copy(), weights=[1, 1, 1])
    third = np.float32(1 / 3)
    mean = ((third * -deltas[0]) + third * -deltas[1]) + third * -deltas[2]
    assert bits(run(job).params) == bits(params - mean)


def test_one_learner_is_followed() -> None:
    """One responder, lr 1, mu 0: the global parameters become the learner's."""
    anchor = np.arange(300, dtype=np.float32)
    local = anchor + np.float32(0.25)
    job = make_job([anchor - local], params=anchor.copy())
    assert bits(run(job).params) == bits(local)
