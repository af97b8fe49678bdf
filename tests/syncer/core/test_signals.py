"""Signals, exit codes and the phase table (C80 to C86)."""

from __future__ import annotations

from typing import Any

import pytest

from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from tests.syncer.core.harness import Driver, FakeResume, of_type
from wire.errors import ErrorCode


def test_c80_drains_then_freezes_with_t_g() -> None:
    driver = Driver(fragments=2, pipeline=2, quorum=1).started(1)
    driver.push(0, 1)
    driver.signal()
    assert driver.phase is Phase.DRAIN
    assert not of_type(driver.push(0, 2), c.SendPull), "no launch"
    driver.push(0, 3)
    assert driver.phase is Phase.DELIVER
    assert of_type(driver.log, c.SendCut)[0].step == 3
    driver.ack(0, 3)
    assert driver.finish.code == 0


def test_c80_retries_are_included() -> None:
    driver = Driver(quorum=2, quorum_timeout=30.0).started(2)
    driver.signal()
    driver.leave(1)
    commands = driver.join(1, generation=2)
    assert of_type(commands, c.SendPull)[0].attempt == 2
    driver.push(0, 1, attempt=2)
    driver.push(1, 1, attempt=2, generation=2)
    assert driver.phase is Phase.DELIVER


def test_c80_is_bounded_by_the_quorum_timeout_from_the_signal() -> None:
    driver = Driver(fragments=3, pipeline=3, quorum=2, quorum_timeout=30.0).started(2)
    for learner in (0, 1):
        driver.push(learner, 1)
    driver.wait(20)
    driver.signal()
    driver.wait(29)
    assert driver.phase is Phase.DRAIN
    driver.wait(1.5)
    assert driver.phase is Phase.DELIVER
    stopped = [r for r in driver.records("attempt_discarded") if r["reason"] == "stop"]
    assert sorted(r["round"] for r in stopped) == [2, 3, 4]
    assert driver.saves[-1].snapshot.global_step == 1


def test_c80_with_nothing_open_freezes_at_once() -> None:
    driver = Driver(quorum=1, min_round_interval=60.0).started(1)
    driver.push(0, 1)
    assert driver.phase is Phase.RUN
    driver.signal()
    assert driver.phase is Phase.DELIVER


def test_c80_c62_without_any_learner_the_bound_ends_the_wait() -> None:
    driver = Driver(quorum=1, quorum_timeout=30.0).started(1)
    driver.leave(0)
    driver.signal()
    driver.wait(31)
    assert driver.finish.code == 0
    assert driver.records("attempt_discarded")[-1]["reason"] == "stop"


def test_c80_in_freeze_or_later_a_first_signal_changes_nothing() -> None:
    driver = Driver(quorum=1, total_steps=1).started(1)
    driver.push(0, 1)
    driver.signal()
    assert driver.phase is Phase.DELIVER
    driver.ack(0, 1)
    assert driver.finish.code == 0


def test_c80_when_t_is_launched_the_signal_only_adds_the_bound() -> None:
    driver = Driver(fragments=2, quorum=1, total_steps=2, quorum_timeout=10.0).started(1)
    driver.push(0, 1)
    driver.signal()
    driver.wait(10.1)
    assert driver.phase is Phase.DELIVER
    assert driver.saves[-1].snapshot.global_step == 1


def test_c80_a_failing_disk_does_not_outlast_the_bound() -> None:
    driver = Driver(quorum=1, checkpoint_every=1, quorum_timeout=30.0).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.answer_all(c.StartMerge)
    driver.wait(1)
    driver.signal()
    driver.wait(29)
    driver.fail_save()
    driver.wait(1)
    assert driver.phase is Phase.FREEZE
    assert [r["step"] for r in driver.records()] == [1], "applied, so recorded"
    assert not of_type(driver.log, c.SendBroadcast)[1:]
    driver.auto = True
    driver.answer_all(c.SaveCheckpoint)
    driver.answer_all(c.DrainPool)
    assert driver.phase is Phase.DELIVER
    assert driver.saves[-1].kind is c.SaveKind.TERMINAL


def test_c81_a_second_signal_writes_the_last_cut_and_exits_1() -> None:
    driver = Driver(fragments=2, quorum=1).started(1)
    driver.push(0, 1)
    driver.signal()
    driver.signal()
    (save,) = driver.saves
    assert save.kind is c.SaveKind.RECOVERY
    assert save.snapshot.global_step == 1
    assert driver.finish.code == 1
    assert driver.finish.error is None
    assert {r["reason"] for r in driver.records("attempt_discarded")} == {"stop"}
    assert not of_type(driver.log, c.WriteMarker)


def test_c81_waits_for_a_write_in_progress() -> None:
    driver = Driver(quorum=1, checkpoint_every=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.answer_all(c.StartMerge)
    driver.signal()
    driver.signal()
    assert len(driver.open_of(c.SaveCheckpoint)) == 1
    assert [r["step"] for r in driver.records()] == [1]
    driver.answer_all(c.SaveCheckpoint)
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.kind is c.SaveKind.RECOVERY
    driver.signal()
    assert not driver.core.finished
    driver.answer_all(c.SaveCheckpoint)
    assert driver.finish.code == 1


def test_c81_a_write_that_fails_is_not_tried_again() -> None:
    driver = Driver(quorum=1).started(1)
    driver.auto = False
    driver.signal()
    driver.signal()
    driver.fail_save("disk full")
    assert driver.finish.code == 1
    assert "disk full" in driver.finish.reason


def test_c81_in_the_backoff_of_a_failed_write() -> None:
    driver = Driver(quorum=1, checkpoint_every=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.answer_all(c.StartMerge)
    driver.fail_save()
    driver.signal()
    driver.signal()
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.kind is c.SaveKind.RECOVERY
    assert not save.patch
    driver.answer_all(c.SaveCheckpoint)
    assert driver.finish.code == 1


@pytest.mark.parametrize("until", [c.DrainPool, c.SaveCheckpoint, c.WriteFinalState])
def test_c81_while_freezing(until: type[Any]) -> None:
    driver = Driver(quorum=1, total_steps=1, final_state=True).started(1)
    driver.auto = False
    driver.push(0, 1)
    for kind in (c.StartMerge, c.DrainPool, c.SaveCheckpoint):
        if driver.open_of(until):
            break
        driver.answer_all(kind)
    assert driver.open_of(until)
    driver.signal()
    assert driver.phase is Phase.FREEZE
    driver.signal()
    driver.auto = True
    driver.answer_all(c.SaveCheckpoint)
    driver.answer_all(c.SaveCheckpoint)
    assert driver.finish.code == 1
    assert driver.finish.error is not None
    assert driver.saves[-1].kind is c.SaveKind.RECOVERY
    assert not of_type(driver.log, c.SendCut | c.WriteMarker)


def test_c81_while_delivering_the_cut_is_on_disk_already() -> None:
    driver = Driver(quorum=1, total_steps=1, mark_final=True).started(1)
    driver.push(0, 1)
    driver.signal()
    driver.signal()
    assert [save.kind for save in driver.saves] == [c.SaveKind.TERMINAL]
    assert driver.finish.code == 1
    assert driver.finish.error is not None
    assert not of_type(driver.log, c.WriteMarker)


@pytest.mark.parametrize(("mark", "code"), [(False, 0), (True, 1)])
def test_c82_before_the_barrier(mark: bool, code: int) -> None:
    driver = Driver(quorum=2, mark_final=mark).started(1)
    driver.signal()
    assert driver.finish.code == code
    assert bool(driver.finish.reason) is mark
    assert driver.finish.error is not None
    assert driver.finish.error.code is ErrorCode.STOPPED
    assert not driver.saves


def test_c82_a_resumed_file_stays_untouched() -> None:
    driver = Driver(quorum=2, resumed=FakeResume(3))
    driver.join(0)
    driver.signal()
    assert driver.finish.code == 0
    assert not driver.saves


def test_c83_budget_mode_before_the_gate_closed() -> None:
    driver = Driver(quorum=1, learners=1, budget_steps=5).started(1)
    driver.push(0, 1)
    driver.signal()
    assert [(s.kind, s.snapshot.global_step) for s in driver.saves] == [(c.SaveKind.RECOVERY, 1)]
    assert driver.finish.code == 1
    assert driver.finish.error is not None
    assert driver.finish.error.code is ErrorCode.STOPPED


def test_c83_budget_mode_after_the_gate_closed() -> None:
    driver = Driver(quorum=2, learners=2, budget_steps=5).started(2)
    driver.report(0, 5)
    driver.signal()
    assert not driver.saves
    assert driver.finish.code == 1
    assert driver.finish.error is not None


def test_c83_in_init_phase_without_a_model() -> None:
    driver = Driver(quorum=2, learners=2, budget_steps=5)
    driver.join(0)
    driver.signal()
    assert driver.finish.code == 1
    assert not driver.saves


def test_c84_every_nonzero_exit_names_its_cause() -> None:
    ends = []
    driver = Driver().started(1)
    driver.send(e.Failure("SVD worker 0 died"))
    ends.append(driver.finish)
    driver = Driver().started(1)
    driver.signal()
    driver.signal()
    ends.append(driver.finish)
    for finish in ends:
        assert finish.code == 1
        assert finish.reason
        assert "\n" not in finish.reason


def test_n34_no_checkpoint_after_a_poisoned_pool() -> None:
    driver = Driver(quorum=1, checkpoint_every=1).started(1)
    saves = len(driver.saves)
    driver.send(e.Failure("SVD pool: no answer in 3540 s"))
    assert driver.finish.code == 1
    assert len(driver.saves) == saves
    assert driver.signal() == []


def test_c85_a_run_stopped_short_does_not_claim_completion() -> None:
    driver = Driver(quorum=1, total_steps=100).started(1)
    driver.signal()
    driver.push(0, 1)
    driver.ack(0, 1)
    texts = [log.text for log in of_type(driver.log, c.Log)]
    assert "all learners acknowledged final cut" in texts
    assert not [text for text in texts if text.startswith("training complete")]


def test_c86_after_the_end_nothing_is_answered() -> None:
    driver = Driver().started(1)
    driver.send(e.Failure("x"))
    assert driver.join(3) == []
    assert driver.push(0, 1) == []
    assert driver.signal() == []
