"""The final cut (C60 to C67)."""

from __future__ import annotations

from typing import Any

import pytest

from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from syncer.events import Member
from tests.syncer.core.harness import Driver, of_type
from wire.errors import ErrorCode


def delivered(learners: int = 2, **config: Any) -> Driver:
    """A run of one round, all learners in, its cut being delivered at step 1."""
    driver = Driver(quorum=learners, **({"total_steps": 1} | config)).started(learners)
    for learner in range(learners):
        driver.push(learner, 1)
    assert driver.phase is Phase.DELIVER
    return driver


def names(commands: list[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands if not isinstance(command, c.Log)]


def cut_members(commands: list[c.Command]) -> list[Member]:
    return [cut.member for cut in of_type(commands, c.SendCut)]


def frozen(**config: Any) -> Driver:
    """FREEZE entered, its tasks still open."""
    driver = Driver(**({"quorum": 2, "total_steps": 1} | config)).started(2)
    driver.auto = False
    driver.push(0, 1)
    driver.push(1, 1)
    driver.answer_all(c.StartMerge)
    assert driver.phase is Phase.FREEZE
    return driver


def test_freeze_drains_the_pool_then_saves_then_writes_the_state_then_delivers() -> None:
    driver = frozen(final_state=True)
    assert [type(task) for task in driver.open_tasks.values()] == [c.DrainPool]
    assert names(driver.answer_all(c.DrainPool)) == ["SaveCheckpoint"]
    assert driver.saves[-1].kind is c.SaveKind.TERMINAL
    assert driver.saves[-1].last
    assert names(driver.answer_all(c.SaveCheckpoint)) == ["WriteTape", "WriteFinalState"]
    assert names(driver.answer_all(c.WriteFinalState)) == ["SendCut", "SendCut"]
    (record,) = driver.records("finalize")
    assert record["checkpoint_step"] == 1
    assert record["members"] == [{"id": 0, "generation": 1}, {"id": 1, "generation": 1}]


def test_c60_the_cut_goes_to_every_current_group_complete() -> None:
    driver = Driver(fragments=3, pipeline=1, quorum=1, total_steps=4).started(1)
    for step in range(1, 5):
        driver.push(0, step)
    (cut,) = of_type(driver.log, c.SendCut)
    assert cut.step == 4
    assert cut.versions == (4, 2, 3)
    assert len(cut.params) == 3


def test_c61_the_cut_is_the_terminal_checkpoint_and_always_rewritten() -> None:
    driver = delivered(checkpoint_every=1)
    assert [s.kind for s in driver.saves[-2:]] == [c.SaveKind.PERIODIC, c.SaveKind.TERMINAL]
    (cut, _) = of_type(driver.log, c.SendCut)
    for params, state in zip(cut.params, driver.saves[-1].snapshot.fragments, strict=True):
        assert params is state.params


def test_c60_a_frozen_id_that_reconnects_gets_the_full_cut_and_is_eligible() -> None:
    driver = delivered()
    driver.leave(1)
    assert cut_members(driver.join(1, generation=2)) == [Member(1, 2)]
    driver.ack(0, 1)
    assert driver.phase is Phase.DELIVER
    commands = driver.ack(1, 1, generation=2)
    assert [s.member for s in of_type(commands, c.SendShutdown)] == [Member(0, 1), Member(1, 2)]
    assert driver.finish.code == 0


def test_c60_reconnects_during_the_freeze_get_the_cut_when_it_is_there() -> None:
    driver = frozen()
    driver.leave(1)
    assert not cut_members(driver.join(1, generation=2))
    driver.join(5)
    driver.auto = True
    commands = driver.answer_all(c.DrainPool)
    assert cut_members(commands) == [Member(0, 1), Member(1, 2), Member(5, 1)]


def test_c60_an_id_outside_the_frozen_set_gets_a_courtesy() -> None:
    driver = delivered()
    assert cut_members(driver.join(7)) == [Member(7, 1)]
    driver.ack(7, 1)
    assert driver.phase is Phase.DELIVER, "C63: it is never counted"
    driver.ack(0, 1)
    commands = driver.ack(1, 1)
    assert [s.member.learner_id for s in of_type(commands, c.SendShutdown)] == [0, 1, 7]


def test_c60_not_eligible_before_all_of_the_cut_is_queued() -> None:
    driver = frozen()
    driver.answer_all(c.DrainPool)
    driver.answer_all(c.SaveCheckpoint)
    driver.ack(0, 1)
    assert driver.core.dropped == {"final_ack": 1}
    for learner in (0, 1):
        driver.send(e.CutQueued(Member(learner, 1)))
        driver.ack(learner, 1)
    assert driver.finish.code == 0


def test_c62_nobody_there_is_a_warning() -> None:
    driver = Driver(quorum=1, final_state=True, total_steps=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.leave(0)
    driver.auto = True
    driver.answer_all(c.StartMerge)
    assert driver.finish.code == 0
    assert of_type(driver.log, c.WriteFinalState)
    assert driver.saves[-1].kind is c.SaveKind.TERMINAL
    assert [log for log in of_type(driver.log, c.Log) if log.level == "warning"]


def test_c62_nobody_there_fails_a_run_that_wants_a_marker() -> None:
    driver = Driver(quorum=1, mark_final=True, total_steps=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.leave(0)
    driver.auto = True
    driver.answer_all(c.StartMerge)
    assert driver.finish.code == 1
    assert driver.finish.reason
    assert not of_type(driver.log, c.WriteMarker)


def test_c63_order_eligible_then_step() -> None:
    driver = delivered()
    driver.ack(0, 2)
    driver.ack(0, 1, generation=9)
    assert driver.core.dropped == {"final_ack": 2}
    driver.ack(0, 1)
    driver.ack(0, 1)
    assert driver.phase is Phase.DELIVER, "repeats are harmless"
    driver.ack(1, 1)
    assert driver.core.finished


def test_c63_no_disconnect_undoes_an_ack() -> None:
    driver = delivered()
    driver.ack(0, 1)
    driver.leave(0)
    commands = driver.ack(1, 1)
    assert [s.member.learner_id for s in of_type(commands, c.SendShutdown)] == [1]
    assert driver.finish.code == 0


def test_c63_an_ack_before_delivery_is_dropped() -> None:
    driver = frozen()
    driver.ack(0, 1)
    assert driver.core.dropped == {"final_ack": 1}


def test_p6_an_eof_after_the_last_ack_is_no_fault() -> None:
    driver = delivered(mark_final=True)
    driver.auto = False
    driver.ack(0, 1)
    driver.leave(0)
    driver.ack(1, 1)
    driver.leave(1)
    commands = driver.answer_all(c.WriteMarker)
    assert not of_type(commands, c.SendShutdown)
    assert driver.finish.code == 0


def test_c64_a_reconnected_learner_earns_shutdown_by_acknowledging_again() -> None:
    driver = delivered(learners=3)
    driver.ack(0, 1)
    driver.leave(0)
    driver.join(0, generation=2)
    driver.ack(1, 1)
    driver.leave(1)
    driver.join(1, generation=2)
    driver.ack(1, 1, generation=2)
    commands = driver.ack(2, 1)
    shut = [s.member for s in of_type(commands, c.SendShutdown)]
    assert shut == [Member(1, 2), Member(2, 1)], "generation 2 of learner 0 never acknowledged"


def test_c65_the_deadline_is_absolute_and_names_who_is_missing() -> None:
    driver = delivered(learners=4, final_ack_timeout=30.0)
    driver.ack(1, 1)
    driver.wait(29)
    driver.leave(3)
    driver.join(3, generation=2)
    assert driver.phase is Phase.DELIVER
    driver.wait(1.1)
    assert driver.finish.code == 1
    assert "0, 2, 3" in driver.finish.reason
    assert driver.finish.error is not None
    assert driver.finish.error.code is ErrorCode.FINAL_TIMEOUT
    assert "0, 2, 3" in driver.finish.error.text
    assert not of_type(driver.log, c.WriteMarker | c.SendShutdown)
    assert driver.records("error")


def test_c65_it_runs_from_the_freeze_and_lets_a_write_end_first() -> None:
    driver = frozen(final_ack_timeout=30.0)
    driver.answer_all(c.DrainPool)
    driver.wait(100)
    assert driver.phase is Phase.FREEZE
    assert not of_type(driver.answer_all(c.SaveCheckpoint), c.SendCut)
    assert driver.finish.code == 1
    assert driver.finish.error is not None
    assert driver.finish.error.code is ErrorCode.FINAL_TIMEOUT


def test_c35_c65_a_terminal_write_that_fails_is_tried_again_until_the_deadline() -> None:
    driver = frozen(final_ack_timeout=3.5, quorum_timeout=900.0)
    driver.answer_all(c.DrainPool)
    driver.fail_save()
    driver.wait(1)
    driver.fail_save()
    driver.wait(2)
    driver.fail_save()
    driver.wait(0.6)
    assert driver.finish.code == 1
    recovered = frozen(final_ack_timeout=3.5)
    recovered.answer_all(c.DrainPool)
    recovered.fail_save()
    recovered.auto = True
    recovered.wait(1)
    assert recovered.phase is Phase.DELIVER


def test_fail_on_an_error_while_freezing_tells_everyone() -> None:
    driver = frozen(final_state=True)
    driver.answer_all(c.DrainPool)
    driver.answer_all(c.SaveCheckpoint)
    driver.send(e.Failure("cannot write --final-state: read-only file system"))
    assert driver.finish.code == 1
    assert driver.finish.error is not None


@pytest.mark.parametrize(
    ("config", "stop", "marked"),
    [
        ({"mark_final": True, "total_steps": 1}, False, True),
        ({"mark_final": False, "total_steps": 1}, False, False),
        ({"mark_final": True, "total_steps": None}, True, True),
        ({"mark_final": True, "total_steps": 9}, True, False),
    ],
)
def test_c66_marker_only_when_asked_and_complete(
    config: dict[str, Any], stop: bool, marked: bool
) -> None:
    driver = Driver(quorum=1, **config).started(1)
    if stop:
        driver.signal()
    driver.push(0, 1)
    driver.auto = False
    commands = driver.ack(0, 1) if driver.send(e.CutQueued(Member(0, 1))) == [] else []
    if marked:
        assert names(commands) == ["WriteMarker"]
        commands = driver.answer_all(c.WriteMarker)
    else:
        assert not of_type(commands, c.WriteMarker)
    assert names(commands) == ["SendShutdown", "Finish"]
    assert driver.finish.code == 0
    assert driver.finish.flush_seconds == 2.0


def test_c66_not_before_the_last_ack() -> None:
    driver = delivered(mark_final=True)
    assert not of_type(driver.ack(0, 1), c.WriteMarker)
    assert of_type(driver.ack(1, 1), c.WriteMarker)


def test_c67_later_messages_are_ignored_and_the_set_never_grows() -> None:
    driver = delivered()
    assert driver.push(0, 2) == []
    assert driver.beat(0, 99) == []
    assert driver.init() == []
    driver.join(7)
    driver.ack(0, 1)
    driver.ack(1, 1)
    assert driver.finish.code == 0, "nothing waits for 7"


def test_c67_hello_rules_stay_active() -> None:
    driver = delivered()
    (refuse,) = of_type(driver.join(0), c.RefuseHello)
    assert refuse.error.code is ErrorCode.DUPLICATE_GENERATION


def test_c19_superseded_groups_are_left_alone_in_finalization() -> None:
    driver = delivered(stall_timeout=1.0, final_ack_timeout=60.0)
    driver.join(1, generation=2)
    assert not of_type(driver.wait(50), c.CloseGroup)
    driver.ack(1, 1, generation=1)
    driver.ack(0, 1)
    assert driver.finish.code == 0, "a superseded generation was eligible, its ack counts"


def test_a_hello_while_the_marker_is_written_gets_the_cut() -> None:
    driver = delivered(learners=1, mark_final=True)
    driver.auto = False
    driver.ack(0, 1)
    assert driver.phase is Phase.DONE
    assert cut_members(driver.join(0, generation=2)) == [Member(0, 2)]
    driver.send(e.CutQueued(Member(0, 2)))
    driver.ack(0, 1, generation=2)
    commands = driver.answer_all(c.WriteMarker)
    assert [s.member.generation for s in of_type(commands, c.SendShutdown)] == [1, 2]


def test_c85_log_lines_for_harnesses() -> None:
    driver = delivered(learners=1)
    driver.ack(0, 1)
    texts = [log.text for log in of_type(driver.log, c.Log)]
    assert "all learners acknowledged final cut" in texts
    assert "training complete after 1 outer steps" in texts
