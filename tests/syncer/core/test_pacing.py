"""Estimates and grace (C14, C15, C17)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer import commands as c
from syncer import events as e
from syncer.config import CoordinatorConfig
from syncer.pacing import Ema, StepEstimate, grace_seconds, launch_interval
from tests.syncer.core.harness import Driver, fake_merge


def test_c14_reference_first_sample_then_halves() -> None:
    estimate = StepEstimate()
    estimate.observe(10.0, 5)
    assert estimate.seconds is None
    estimate.observe(12.0, 5)
    assert estimate.seconds is None, "no step, no sample, and the reference stays"
    estimate.observe(14.0, 7)
    assert estimate.seconds == 2.0
    estimate.observe(15.0, 8)
    assert estimate.seconds == 1.5
    estimate.observe(99.0, 3)
    assert estimate.seconds == 1.5, "a smaller step is no sample"
    estimate.observe(16.0, 9)
    assert estimate.seconds == 1.25, "and moved nothing"


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 2**64 - 1)), max_size=30))
def test_c14_estimates_stay_finite_and_not_negative(messages: list[tuple[float, int]]) -> None:
    estimate = StepEstimate()
    for arrived, step in messages:
        estimate.observe(arrived, step)
        assert estimate.seconds is None or 0 <= estimate.seconds < 1e7


def test_c14_from_push_accepted_or_not_and_dropped_with_the_group() -> None:
    driver = Driver(quorum=2).started(2)
    driver.push(1, 99, local_step=1)
    driver.now += 3
    driver.push(1, 99, local_step=2)
    members = driver.core.members
    assert members.step_seconds(members.current()) == 3.0
    driver.join(1, generation=2)
    driver.leave(1, generation=1)
    assert members.step_seconds(members.current()) is None


def test_c15_ema() -> None:
    ema = Ema()
    assert ema.value is None
    ema.add(4.0)
    assert ema.value == 4.0
    ema.add(2.0)
    assert ema.value == 3.0


@pytest.mark.parametrize(
    ("step", "quorum", "sync", "grace"),
    [
        (None, 9.0, 9.0, 1.0),
        (0.5, 0.0, 0.0, 0.8),
        (0.5, 0.3, 0.1, 0.8 * 0.6),
        (0.5, 2.0, 0.0, 0.0),
        (50.0, 0.0, 0.0, 1.0),
    ],
)
def test_c17_formula(step: float | None, quorum: float, sync: float, grace: float) -> None:
    config = CoordinatorConfig(profile=b"", grace_cap=1.0, grace_gamma=0.8, grace_tau=2.0)
    assert grace_seconds(config, step, quorum, sync) == pytest.approx(grace)


def test_c13_formula() -> None:
    config = CoordinatorConfig(profile=b"", min_round_interval=0.5, sync_interval_steps=24.0)
    assert launch_interval(config, None, 8) == 0.5
    assert launch_interval(config, 0.5, 8) == 1.5
    assert launch_interval(config, 0.1, 8) == 0.5


def test_c15_c17_a_round_uses_its_own_sample_and_the_slowest_member() -> None:
    """ξ_step = max(1, 4) = 4, ξ_quorum = 2 (seeded by this round), ξ_sync = 0 (no commit)."""
    driver = Driver(quorum=1, grace_cap=60.0, grace_gamma=0.5, grace_tau=2.0, total_steps=1)
    driver.join(0)
    driver.join(1)
    driver.beat(0, 0)
    driver.beat(1, 0)
    driver.now += 4
    driver.beat(0, 4)
    driver.beat(1, 1)
    driver.init()
    driver.now += 2
    driver.push(0, 1, local_step=4)
    driver.wait(0.5 * (2 * 4 - 2) - 0.01)
    assert driver.step == 0
    driver.wait(0.02)
    assert driver.step == 1
    assert driver.records()[0]["grace_ms"] == 3000
    assert driver.records()[0]["quorum_ms"] == 2000


def test_c15_sync_is_compute_plus_commit_without_the_wait_for_its_turn() -> None:
    driver = Driver(
        fragments=2, quorum=1, checkpoint_every=1, grace_cap=60.0, total_steps=4
    ).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.push(0, 2)
    first, second = driver.open_of(c.StartMerge)
    driver.send(e.MergeDone(second.ticket, fake_merge(second.job), 0.25))
    driver.now += 10
    driver.send(e.MergeDone(first.ticket, fake_merge(first.job), 0.5))
    driver.now += 1.5
    driver.answer_all(c.SaveCheckpoint)
    driver.now += 0.5
    driver.answer_all(c.SaveCheckpoint)
    one, two = driver.records()
    assert one["sync_ms"] == 2000
    assert two["sync_ms"] == 750
    assert two["ms"] == 12000
    assert one["sync/merge_seconds"] == 2.0
