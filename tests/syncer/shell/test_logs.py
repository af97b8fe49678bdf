"""Rate-limited lines and the progress line."""

from __future__ import annotations

import logging

import pytest

from syncer.logs import Progress, RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_flood_of_one_kind_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = RateLimited(burst=3, period=10, clock=clock)
    for number in range(100):
        log.log(logging.WARNING, "refused", f"refused {number}")
    log.log(logging.INFO, "joined", "another kind passes")
    assert [r.message for r in caplog.records] == [
        *(f"refused {number}" for number in range(3)),
        "another kind passes",
    ]
    caplog.clear()
    clock.now = 10
    log.log(logging.WARNING, "refused", "refused again")
    assert [r.message for r in caplog.records] == [
        "97 more lines like this were left out: refused",
        "refused again",
    ]


def test_lines_that_differ_in_numbers_are_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RateLimited(burst=3, period=10, clock=Clock())
    for number in range(50):
        log.text(logging.INFO, f"learner {number} joined, {number % 3} connected")
        log.text(logging.INFO, f"refused: fingerprint {number:016x} is not ab12cd")
    assert len(caplog.records) == 6


def commit(step: int) -> dict[str, object]:
    return {
        "step": step,
        "fragment": 1,
        "responded": [0, 1],
        "expected": [0, 1, 2],
        "ms": 12,
        "sync_ms": 3,
        "gnorm": 0.5,
    }


def test_one_line_a_round_or_every_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(period=2, clock=clock)
    for step in range(1, 101):
        clock.now = step * 0.1
        progress.committed(commit(step))
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith("round 1 fragment 1: 2 of 3 answered in 12 ms")
    assert len(lines) == 5
    assert lines[1].endswith("10.0 rounds/s")
    caplog.clear()
    for step in (101, 102):
        clock.now += 5
        progress.committed(commit(step))
    assert len(caplog.records) == 2
