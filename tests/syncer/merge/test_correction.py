"""The directional correction (N15 to N17)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncer.merge import blocks
from tests.syncer.merge import oracle
from tests.syncer.merge.rounds import bits, floats, make_job, merged
from wire.layout import MergeMode

BRANCHES = (0.0, 0.2)


def with_cosine(cosine: float, numel: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A gradient and a momentum of norm 1 with about that cosine."""
    a, b = np.linalg.qr(np.random.default_rng(seed).standard_normal((numel, 2)))[0].T
    return (cosine * a + np.sqrt(1 - cosine**2) * b).astype(np.float32), a.astype(np.float32)


def assert_corrected(grad: np.ndarray, momentum: np.ndarray) -> None:
    """N26: 2^-21 * max(abs(ref)), away from branch points."""
    result = merged(make_job([grad], momentum=momentum, heloco=True))
    ref = oracle.heloco(grad, momentum)
    assert np.abs(result.astype(np.float64) - ref).max() <= 2.0**-21 * np.abs(ref).max()


@given(
    st.floats(-1, 1),
    st.floats(-7, 30),
    st.floats(-7, 30),
    st.integers(2, 500),
    st.integers(0, 1000),
)
def test_every_branch(cosine: float, own: float, other: float, numel: int, seed: int) -> None:
    assume(all(abs(cosine - branch) > 1e-3 for branch in BRANCHES))
    grad, momentum = with_cosine(cosine, numel, seed)
    assert_corrected(
        (grad * 10.0**own).astype(np.float32), (momentum * 10.0**other).astype(np.float32)
    )


@pytest.mark.parametrize("cosine", [-0.9, -0.1, 0.1, 0.19])
def test_a_large_tensor(cosine: float) -> None:
    grad, momentum = with_cosine(cosine, 3 * blocks.BLOCK + 5, 1)
    assert_corrected(grad, momentum)


@pytest.mark.parametrize("cosine", [0.21, 0.5, 1.0])
def test_agreement_changes_nothing(cosine: float) -> None:
    grad, momentum = with_cosine(cosine, 50, 2)
    result = merged(make_job([grad], momentum=momentum, heloco=True))
    assert bits(result) == bits(np.float32(0) + grad)


@pytest.mark.parametrize(("own", "other"), [(1e-9, 1.0), (1.0, 1e-9), (0.0, 1.0), (1.0, 0.0)])
def test_tiny_norms_change_nothing(own: float, other: float) -> None:
    """N15 first case; N17: a momentum of zero is one of them."""
    grad, momentum = with_cosine(-0.5, 50, 3)
    grad, momentum = grad * np.float32(own), momentum * np.float32(other)
    result = merged(make_job([grad], momentum=momentum, heloco=True))
    assert bits(result) == bits(np.float32(0) + grad)


def test_it_is_taken_by_responder_and_tensor() -> None:
    """Each responder's slice of each tensor is corrected against the same slice of momentum."""
    pairs = [with_cosine(c, 40, seed) for seed, c in enumerate((-0.8, 0.1, 0.9, -0.2))]
    grads = [np.concatenate([pairs[0][0], pairs[1][0]]), np.concatenate([pairs[2][0], pairs[3][0]])]
    momentum = np.concatenate([pairs[0][1], pairs[1][1]])
    result = merged(
        make_job(grads, weights=[2, 1], numels=[40, 40], momentum=momentum, heloco=True)
    )
    parts = []
    for part in (slice(0, 40), slice(40, 80)):
        turned = [oracle.heloco(g[part], momentum[part]) for g in grads]
        parts.append(oracle.avg(turned, [2, 1]))
    ref = np.concatenate(parts)
    assert np.abs(result - ref).max() <= 2.0**-20 * np.abs(ref).max()


@given(st.integers(0, 10_000))
def test_rda_averages_the_corrected_gradients(seed: int) -> None:
    """N4: the norms of rda are those after the correction."""
    generator = np.random.default_rng(seed)
    cosines = generator.uniform(-1, 1, 3)
    assume(all(abs(c - branch) > 1e-3 for c in cosines for branch in BRANCHES))
    momentum = with_cosine(0.0, 60, seed)[1] * np.float32(0.3)
    grads = []
    for number, c in enumerate(cosines):
        other = with_cosine(0.0, 60, seed + 1 + number)[0]
        axis = momentum / np.linalg.norm(momentum)
        other = other - (other @ axis) * axis
        grads.append(
            (c * axis + np.sqrt(1 - c * c) * other / np.linalg.norm(other)).astype(np.float32)
        )
    job = make_job(grads, mode=MergeMode.RDA, weights=[3, 1, 2], momentum=momentum, heloco=True)
    turned = [oracle.heloco(g, momentum) for g in grads]
    ref = oracle.rda(turned, [3, 1, 2])
    d = oracle.norm(oracle.direction(turned, [3, 1, 2]))
    assume(d > 1e-3)
    # The bounds of the correction and of rda add up.
    assert np.abs(merged(job) - ref).max() <= 2.0**-19 * np.abs(ref).max() / min(1, d)


def test_its_input_is_not_modified() -> None:
    """N4."""
    grad, momentum = with_cosine(-0.5, 100, 6)
    job = make_job([grad], momentum=momentum, heloco=True, params=floats(range(100)))
    before = bytes(job.responses[0].payload), bits(job.momentum), bits(job.params)
    merged(job)
    assert (bytes(job.responses[0].payload), bits(job.momentum), bits(job.params)) == before
