"""Which PUSH is admitted, and why others are not (C20, P4)."""

from __future__ import annotations

from tests.syncer.core.harness import Driver
from tests.syncer.core.test_rounds import pulls


def test_c20_order_of_refusals() -> None:
    """Each PUSH breaks its row and, where it can, all later ones: the first match wins."""
    driver = Driver(fragments=2, pipeline=1, quorum=3, max_base_lag=0).started(3)
    for step in (1, 2, 3, 4):
        for learner in range(3):
            driver.push(learner, step)
    driver.join(1, generation=2)
    assert pulls(driver.log)[-1] == (5, 0, 1, [0, 1, 2])
    driver.push(0, 5)
    cases = [
        ("out_of_round", {"learner_id": 1, "step": 6, "generation": 2, "base": 99}),
        ("out_of_round", {"learner_id": 1, "step": 5, "attempt": 2, "base": 99}),
        ("out_of_round", {"learner_id": 1, "step": 5, "fragment": 1, "base": 99}),
        ("unexpected_member", {"learner_id": 1, "step": 5, "generation": 2, "base": 99}),
        ("future_base", {"learner_id": 0, "step": 5, "base": 4}),
        ("stale", {"learner_id": 0, "step": 5, "base": 2}),
        ("duplicate", {"learner_id": 0, "step": 5, "base": 3}),
    ]
    for _, fields in cases:
        assert driver.push(**fields) == [], "silent"
    driver.push(1, 5)
    driver.push(2, 5)
    record = driver.records()[-1]
    assert record["step"] == 5
    assert record["rejected"] == {
        "out_of_round": 3,
        "unexpected_member": 1,
        "future_base": 1,
        "stale": 1,
        "duplicate": 1,
    }
    assert record["sync/rejected_stale_updates"] == 1


def test_c20_any_older_base_is_admitted_without_a_limit() -> None:
    driver = Driver(fragments=1, quorum=1).started(1)
    for step in range(1, 30):
        driver.push(0, step, base=0)
    assert [r["responders"][0]["staleness"] for r in driver.records()] == list(range(29))


def test_c20_lag_is_a_difference_of_versions() -> None:
    """One missed update of a fragment is a lag of F."""
    driver = Driver(fragments=3, pipeline=1, max_base_lag=3, quorum=1, total_steps=7).started(1)
    for step in range(1, 7):
        driver.push(0, step)
    driver.push(0, 7, base=0)
    assert driver.step == 6
    driver.push(0, 7, base=1)
    assert driver.step == 7


def test_c20_the_first_valid_push_wins() -> None:
    driver = Driver(quorum=2, total_steps=1).started(2)
    driver.push(0, 1, tokens=100)
    driver.push(0, 1, tokens=999)
    driver.push(1, 1, tokens=100)
    assert driver.records()[0]["responders"][0]["c_tokens"] == 100


def test_p4_answers_to_two_attempts_and_to_a_committed_round_are_silent() -> None:
    driver = Driver(quorum=2, quorum_timeout=10.0).started(2)
    driver.wait(10.1)
    driver.push(0, 1, attempt=1)
    driver.push(0, 1, attempt=2)
    driver.push(1, 1, attempt=2)
    assert driver.push(0, 1, attempt=2) == []
    assert driver.step == 1
