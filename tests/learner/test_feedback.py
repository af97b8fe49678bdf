"""Error feedback (L29)."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.feedback import SLICE, Feedback
from wire.dtypes import DType
from wire.tensors import NonFiniteValues, decode, encode


def delta(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(600, generator=torch.Generator().manual_seed(seed)) * scale


def push(feedback: Feedback, step: int, values: Tensor) -> bytes:
    payload = bytes(feedback.encode(0, step, values.clone()))
    feedback.sent(0, step)
    return payload


@pytest.mark.parametrize("dtype", [DType.BF16, DType.Q4])
def test_what_was_lost_rides_along(dtype: DType) -> None:
    """PUSH = enc(d + r); r' = (d + r) - dec(payload); r := (1-α)·r' once its round is applied."""
    feedback = Feedback(1, dtype, 0.25, enabled=True)
    first, second = delta(1), delta(2)
    payload = push(feedback, 5, first)
    assert payload == bytes(encode(first, dtype))
    feedback.applied(0, 5)
    carried = (first - decode(payload, dtype, 600)) * torch.tensor(0.75)
    assert push(feedback, 6, second) == bytes(encode(second + carried, dtype))


def test_a_discarded_push_has_no_effect() -> None:
    """A new attempt starts again from d and r."""
    feedback = Feedback(1, DType.Q4, 0.5, enabled=True)
    assert push(feedback, 5, delta(1)) == push(feedback, 5, delta(1))


def test_r_stays_when_another_round_was_applied() -> None:
    feedback = Feedback(1, DType.Q4, 0.5, enabled=True)
    push(feedback, 5, delta(1))
    feedback.applied(0, 4)
    assert feedback.carried_norm(0) == 0
    feedback.applied(0, 5)
    kept = feedback.carried_norm(0)
    assert kept > 0
    push(feedback, 7, delta(2))
    feedback.applied(0, 6)
    assert feedback.carried_norm(0) == kept


def test_a_push_that_never_left_is_no_push() -> None:
    """L12: dropped with its group."""
    feedback = Feedback(1, DType.Q4, 0.5, enabled=True)
    feedback.encode(0, 5, delta(1))
    feedback.applied(0, 5)
    assert feedback.carried_norm(0) == 0


def test_r_is_dropped_when_it_outgrows_the_delta() -> None:
    feedback = Feedback(1, DType.Q4, 0.5, enabled=True)
    push(feedback, 5, delta(1))
    feedback.applied(0, 5)
    small = delta(2, 1e-6)
    assert push(feedback, 6, small) == bytes(encode(small, DType.Q4))
    assert feedback.carried_norm(0) == 0


def test_rollback_forgets() -> None:
    feedback = Feedback(1, DType.BF16, 0.5, enabled=True)
    push(feedback, 5, delta(1))
    feedback.applied(0, 5)
    feedback.reset()
    assert feedback.carried_norm(0) == 0


@pytest.mark.parametrize(
    ("dtype", "enabled"), [(DType.F32, True), (DType.BF16, False), (DType.Q4, False)]
)
def test_off_is_plain_encoding(dtype: DType, enabled: bool) -> None:
    feedback = Feedback(1, dtype, 0.5, enabled=enabled)
    for step in (1, 2):
        assert push(feedback, step, delta(step)) == bytes(encode(delta(step), dtype))
        feedback.applied(0, step)
    assert feedback.carried_norm(0) == 0


def test_bad_values_are_refused() -> None:
    """L27."""
    feedback = Feedback(1, DType.Q4, 0.5, enabled=True)
    bad = delta(1)
    bad[17] = float("inf")
    with pytest.raises(NonFiniteValues):
        feedback.encode(0, 1, bad)


def test_the_sum_of_what_is_sent_follows_the_sum_of_what_is_meant() -> None:
    """With α = 0 nothing is lost for good: after n pushes only the last rounding is missing."""
    feedback = Feedback(1, DType.Q4, 0.0, enabled=True)
    meant = torch.zeros(600, dtype=torch.float64)
    got = torch.zeros(600, dtype=torch.float64)
    plain = torch.zeros(600, dtype=torch.float64)
    drift = delta(99, 0.3)
    for step in range(1, 30):
        values = delta(step) + drift
        meant += values
        plain += decode(encode(values, DType.Q4), DType.Q4, 600)
        got += decode(push(feedback, step, values), DType.Q4, 600)
        feedback.applied(0, step)
    assert (got - meant).norm() < 0.6 * (plain - meant).norm()


LARGE = 2 * SLICE + 300
"""Values in several slices, and q4 blocks with a tail."""


@pytest.mark.parametrize("dtype", [DType.BF16, DType.Q4])
@pytest.mark.parametrize("in_place", [True, False])
def test_slices_are_the_whole(dtype: DType, in_place: bool) -> None:
    """L29 of a fragment that is encoded in several slices, to the bit."""
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randn(2, LARGE, generator=generator)
    feedback = Feedback(1, dtype, 0.25, enabled=True, in_place=in_place)
    payload = push(feedback, 5, first)
    assert payload == bytes(encode(first, dtype))
    feedback.applied(0, 5)
    carried = (first - decode(payload, dtype, LARGE)) * torch.tensor(0.75)
    assert push(feedback, 6, second) == bytes(encode(second + carried, dtype))


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.Q4])
def test_without_feedback_a_push_takes_its_payload_only(dtype: DType) -> None:
    """The bytes are those of the codec; the delta's memory is free again, or is the payload."""
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(4))
    expected = bytes(encode(values, dtype))
    feedback = Feedback(1, dtype, 0.5, enabled=False)
    payload = feedback.encode(0, 1, values)
    assert bytes(payload) == expected
    address = np.frombuffer(payload, np.uint8).ctypes.data
    assert (address == values.data_ptr()) == (dtype is DType.F32)
    gone = weakref.ref(values)
    del values
    assert gone() is None
    assert bytes(payload) == expected


def test_a_difference_becomes_the_payload_of_its_delta() -> None:
    """What the boundary encodes at once is what a worker would have made of the whole."""
    generator = torch.Generator().manual_seed(6)
    values, base = torch.randn(2, LARGE, generator=generator)
    feedback = Feedback(1, DType.BF16, 0.5, enabled=False)
    assert feedback.direct
    payload = feedback.encode_difference(
        LARGE, zip(values.split(1000), base.split(1000), strict=True)
    )
    assert bytes(payload) == bytes(encode(values - base, DType.BF16))
    assert feedback.norm(payload) == pytest.approx(float((values - base).norm()), rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_difference_that_bf16_cannot_carry(bad: float) -> None:
    """L27, W52."""
    feedback = Feedback(1, DType.BF16, 0.5, enabled=False)
    values = torch.zeros(LARGE)
    values[-1] = bad
    with pytest.raises(NonFiniteValues):
        feedback.encode_difference(LARGE, [(values, torch.zeros(LARGE))])


@pytest.mark.parametrize("enabled", [True, False])
def test_a_bad_value_is_still_there_to_be_named(enabled: bool) -> None:
    """L27: what was encoded before it does not hide it, or look bad itself."""
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(5))
    values[-1] = float("nan")
    feedback = Feedback(1, DType.BF16, 0.5, enabled=enabled)
    with pytest.raises(NonFiniteValues):
        feedback.encode(0, 1, values)
    assert torch.isfinite(values[:-1]).all()
    assert torch.isnan(values[-1])
