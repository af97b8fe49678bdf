"""The stateful model of `machine`, short here and at length in the slow suite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.syncer.core.machine import CoreMachine

CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=CHECKS,
        ),
    )


def test_random_runs_keep_every_invariant() -> None:
    run(20, 30)


@pytest.mark.slow
def test_many_random_runs_keep_every_invariant() -> None:
    run(1000, 50)
