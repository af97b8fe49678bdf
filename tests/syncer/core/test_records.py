"""The records the core writes (C41, C42)."""

from __future__ import annotations

import json

from checkpoint.snapshot import LedgerEntry
from tests.syncer.core.harness import PRINT, PROFILE, Driver, FakeResume

COMMIT_FIELDS = {
    "protocol_version",
    "delta_semantics",
    "step",
    "fragment",
    "launch_base_version",
    "attempt",
    "gnorm",
    "ms",
    "quorum",
    "expected",
    "expected_members",
    "responded",
    "responded_members",
    "missed_grace",
    "missed_members",
    "quorum_ms",
    "grace_ms",
    "sync_ms",
    "responders",
    "rejected",
    "sync/layout_hash",
    "sync/base_version",
    "sync/responders",
    "sync/quorum",
    "sync/rejected_stale_updates",
    "sync/merge_seconds",
    "sync/global_delta_norm",
}


def test_c41_all_fields_with_numeric_order_and_big_generations() -> None:
    big = 2**64 - 1
    driver = Driver(quorum=3, total_steps=1)
    for learner, generation in ((10, 5), (9, big), (0, 7)):
        driver.join(learner, generation)
    driver.init(generation=7)
    driver.now += 0.1
    driver.push(10, 1, generation=5, steps=2, tokens=8)
    driver.push(0, 1, generation=7, steps=1, tokens=4)
    driver.now += 0.15
    driver.push(9, 1, generation=big, steps=4, tokens=8)
    (record,) = driver.records()
    assert set(record) == COMMIT_FIELDS, "ts is the actor's"
    assert record["protocol_version"] == 4
    assert record["delta_semantics"] == "local_minus_raw_anchor"
    assert record["expected"] == record["responded"] == [0, 9, 10]
    assert record["responded_members"][1] == {"id": 9, "generation": big}
    assert record["missed_grace"] == []
    assert [r["weight"] for r in record["responders"]] == [16.0, 16.0, 32.0]
    assert [r["contribution"] for r in record["responders"]] == [0.25, 0.25, 0.5]
    assert record["quorum_ms"] == record["ms"] == 250
    assert record["sync/layout_hash"] == PRINT.hex()
    assert record["sync/responders"] == record["sync/quorum"] == record["quorum"] == 3
    assert record["gnorm"] == record["sync/global_delta_norm"] == 1.0
    assert json.loads(json.dumps(record)) == record


def test_c41_staleness_is_measured_from_the_launch_base() -> None:
    driver = Driver(fragments=2, quorum=1).started(1)
    for step in (1, 2):
        driver.push(0, step)
    driver.push(0, 3, base=0)
    record = driver.records()[-1]
    assert record["launch_base_version"] == record["sync/base_version"] == 1
    assert record["responders"][0]["base_version"] == 0
    assert record["responders"][0]["staleness"] == 1


def test_c41_rejected_counts_since_the_previous_record() -> None:
    driver = Driver(quorum=2, quorum_timeout=5.0).started(2)
    driver.push(0, 1)
    driver.push(0, 1)
    driver.wait(5)
    (discarded,) = driver.records("attempt_discarded")
    assert discarded["rejected"] == {"duplicate": 1}
    driver.push(0, 1, attempt=1)
    for learner in (0, 1):
        driver.push(learner, 1, attempt=2)
    driver.push(0, 1, attempt=2)
    for learner in (0, 1):
        driver.push(learner, 2)
    first, second = driver.records()
    assert first["rejected"] == {"out_of_round": 1}
    assert second["rejected"] == {"out_of_round": 1}
    for learner in (0, 1):
        driver.push(learner, 3)
    assert driver.records()[-1]["rejected"] == {}


def test_c42_start_only_in_a_fresh_run_at_the_barrier() -> None:
    driver = Driver(quorum=2, learners=5)
    driver.join(0)
    driver.init()
    assert not driver.records("start")
    driver.join(1)
    (record,) = driver.records("start")
    assert record == {
        "event": "start",
        "protocol_version": 4,
        "profile": PROFILE.hex(),
        "layout_hash": PRINT.hex(),
        "learners": 5,
        "quorum": 2,
    }
    resumed = Driver(resumed=FakeResume(4, 1, {0: LedgerEntry(4, 4, 4)}))
    resumed.join(0)
    assert resumed.records("start") == []
    assert resumed.records("resume") == [], "C43 is the tape's own"


def test_c42_attempt_discarded_fields_and_never_the_key_step() -> None:
    driver = Driver(quorum=2, quorum_timeout=5.0).started(2)
    driver.push(1, 1)
    driver.wait(5)
    (record,) = driver.records("attempt_discarded")
    assert record == {
        "event": "attempt_discarded",
        "protocol_version": 4,
        "round": 1,
        "fragment": 0,
        "attempt": 1,
        "reason": "quorum_timeout",
        "quorum": 2,
        "expected_members": [{"id": 0, "generation": 1}, {"id": 1, "generation": 1}],
        "responded_members": [{"id": 1, "generation": 1}],
        "rejected": {},
    }


def test_c42_a_round_that_waits_for_its_next_attempt_is_discarded_as_that() -> None:
    driver = Driver(quorum=2, quorum_timeout=30.0).started(2)
    driver.leave(0)
    driver.leave(1)
    driver.signal()
    driver.signal()
    record = driver.records("attempt_discarded")[-1]
    assert record["reason"] == "stop"
    assert record["attempt"] == 2
    assert record["expected_members"] == []
