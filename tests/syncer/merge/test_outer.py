"""The outer step, bit for bit, and what N23 refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.merge.plan import NonFiniteMerge
from tests.syncer.merge import oracle
from tests.syncer.merge.rounds import bits, floats, make_job, run
from wire.dtypes import DType
from wire.layout import MergeMode

FLOAT_MAX = 3.4028234663852886e38
BF16_OVERFLOW = float(np.uint32(0x7F7F8000).view(np.float32))
BELOW_OVERFLOW = float(np.uint32(0x7F7F7FFF).view(np.float32))

moderate = st.floats(-1e10, 1e10, width=32)


@given(
    st.lists(st.tuples(moderate, moderate, moderate), min_size=1, max_size=200),
    st.floats(1e-4, 2),
    st.floats(0, 0.999),
)
def test_nesterov_is_bit_exact(values: list, lr: float, mu: float) -> None:
    """N18: single-rounded operations in that order."""
    params, momentum, grad = (floats(column) for column in zip(*values, strict=True))
    job = make_job([grad], params=params, momentum=momentum, lr=lr, mu=mu)
    expected_params, expected_momentum = oracle.nesterov(
        params, momentum, np.float32(0) + grad, lr, mu
    )
    result = run(job)
    assert bits(result.params) == bits(expected_params)
    assert bits(result.momentum) == bits(expected_momentum)


def test_no_operation_is_fused() -> None:
    """N1: on these values one fused multiply-add would show in hundreds of results."""
    generator = np.random.default_rng(0)
    params, momentum, grad = generator.standard_normal((3, 100_000)).astype(np.float32)
    job = make_job([grad], params=params, momentum=momentum, lr=0.7, mu=0.9)
    expected = oracle.nesterov(params, momentum, grad, 0.7, 0.9)
    mu, lr = np.float64(np.float32(0.9)), np.float64(np.float32(0.7))
    fused = (mu * momentum + grad).astype(np.float32)
    assert (fused != expected[1]).sum() > 100
    step = (grad + (mu * fused).astype(np.float32)).astype(np.float64)
    assert ((params - lr * step).astype(np.float32) != expected[0]).sum() > 100
    result = run(job)
    assert bits(result.params) == bits(expected[0])
    assert bits(result.momentum) == bits(expected[1])


def refused(**options: object) -> int:
    """The learner id that is named; nothing may have changed."""
    job = make_job(**options)
    before = bits(job.params), bits(job.momentum)
    with pytest.raises(NonFiniteMerge) as caught:
        run(job)
    assert (bits(job.params), bits(job.momentum)) == before
    return caught.value.largest.learner_id


def test_a_new_momentum_that_overflows_is_refused() -> None:
    """N23, even when the new parameter would be finite."""
    refused(grads=[floats([3e38])], momentum=floats([3e38]), lr=1e-30, mu=0.9)


def test_a_new_parameter_that_overflows_is_refused() -> None:
    refused(grads=[floats([-3e38])], params=floats([3e38]), lr=1.0)


def test_a_merged_gradient_that_overflows_is_refused() -> None:
    """N23: turned towards the momentum, the first element leaves the range of f32."""
    grad, momentum = floats([FLOAT_MAX, -FLOAT_MAX]), floats([1e30, 3e30])
    assert not np.isfinite(oracle.heloco(grad, momentum)).all()
    refused(grads=[grad], momentum=momentum, heloco=True, lr=1e-38)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.Q4])
def test_a_parameter_that_bf16_cannot_carry_is_refused(dtype: DType) -> None:
    """N23, W52: judged in the bulk dtype of the session."""
    zero = floats([0.0, 0.0])
    refused(grads=[zero], params=floats([1.0, BF16_OVERFLOW]), dtype=dtype)
    refused(grads=[zero], params=floats([-BF16_OVERFLOW, 1.0]), dtype=dtype)
    job = make_job([zero], params=floats([1.0, BELOW_OVERFLOW]), dtype=dtype)
    assert run(job).params.tolist() == [1.0, BELOW_OVERFLOW]


def test_f32_carries_what_bf16_cannot() -> None:
    job = make_job([floats([0.0])], params=floats([FLOAT_MAX]))
    assert run(job).params.tolist() == [FLOAT_MAX]


@pytest.mark.parametrize("at", [0, 65536, 69999])
def test_one_bad_element_anywhere_is_found(at: int) -> None:
    params = np.ones(70_000, np.float32)
    params[at] = 3e38
    grad = np.zeros(70_000, np.float32)
    grad[at] = -3e38
    refused(grads=[grad], params=params, numels=[65_000, 5_000])


@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_largest_gradient_is_named(mode: MergeMode, order: tuple) -> None:
    """C34: by the norm over the whole fragment."""
    sizes = [1.0, 3e38, 2e38]
    grads = [np.full(600, sizes[i] * (-1) ** i, np.float32) for i in order]
    named = refused(
        grads=grads, mode=mode, params=np.full(600, 3e38, np.float32), lr=100.0, numels=[300, 300]
    )
    assert order[named] == 1


def test_the_first_of_equals_is_named() -> None:
    grad = floats([-3e38])
    assert refused(grads=[grad, grad], params=floats([3e38])) == 0
