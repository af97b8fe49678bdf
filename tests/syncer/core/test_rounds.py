"""Launch, capture, completion, admission, attempts, membership (C10 to C23)."""

from __future__ import annotations

import pytest

from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from syncer.events import Member
from tests.syncer.core.harness import Driver, of_type
from wire.errors import ErrorCode


def pulls(commands: list[c.Command]) -> list[tuple[int, int, int, list[int]]]:
    """(step, fragment, attempt, ids) of each PULL."""
    return [
        (p.step, p.fragment, p.attempt, [m.learner_id for m in p.members])
        for p in of_type(commands, c.SendPull)
    ]


# ---- C10 to C13


def test_c10_depth_is_the_smaller_of_pipeline_and_fragments() -> None:
    assert len(pulls(Driver(fragments=5, pipeline=3).started(1).log)) == 3
    assert len(pulls(Driver(fragments=2, pipeline=3).started(1).log)) == 2


def test_c10_rounds_are_round_robin_and_in_order() -> None:
    driver = Driver(fragments=3, pipeline=2, total_steps=7).started(1)
    for step in range(1, 8):
        driver.push(0, step, base=0)
    assert pulls(driver.log) == [(t, (t - 1) % 3, 1, [0]) for t in range(1, 8)]


def test_c10_none_beyond_t() -> None:
    driver = Driver(fragments=4, pipeline=4, total_steps=2).started(1)
    assert [step for step, *_ in pulls(driver.log)] == [1, 2]
    assert driver.phase is Phase.DRAIN


def test_c10_a_round_is_open_until_its_commit_is_published() -> None:
    driver = Driver(fragments=2, pipeline=2, checkpoint_every=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.answer_all(c.StartMerge)
    assert not pulls(driver.log)[2:], "the checkpoint is not durable yet"
    commands = driver.answer_all(c.SaveCheckpoint)
    kinds = [type(command) for command in commands]
    assert kinds.index(c.SendBroadcast) < kinds.index(c.SendPull)


def test_c11_without_a_group_launches_wait_for_one() -> None:
    driver = Driver(quorum=1)
    driver.join(0)
    driver.auto = False
    driver.init()
    driver.answer_all(c.DecodeInit)
    driver.answer_all(c.RemoveMarker)
    driver.leave(0)
    driver.push(0, 1)
    assert driver.phase is Phase.RUN
    driver.auto = True
    driver.wait(100)
    assert pulls(driver.log) == [(1, 0, 1, [0])]
    assert pulls(driver.join(3)) == [(1, 0, 2, [3])]


def test_c12_capture_is_sorted_and_never_changes() -> None:
    driver = Driver(quorum=3)
    for learner in (2, 0, 1):
        driver.join(learner)
    driver.init()
    assert pulls(driver.log) == [(1, 0, 1, [0, 1, 2])]
    driver.join(7)
    driver.push(7, 1)
    for learner in range(3):
        driver.push(learner, 1)
    (record,) = driver.records()
    assert record["expected"] == [0, 1, 2]
    assert record["rejected"] == {"unexpected_member": 1}


def test_c12_quorum_is_capped_by_the_captured() -> None:
    driver = Driver(quorum=3, quorum_timeout=20.0).started(3)
    driver.leave(2)
    driver.wait(2)
    assert driver.phase is Phase.RUN
    driver.push(0, 1, attempt=2)
    driver.push(1, 1, attempt=2)
    assert driver.step == 1
    assert driver.records()[0]["quorum"] == 2


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ({"min_round_interval": 0.5, "sync_interval_steps": 0.0}, 0.5),
        ({"min_round_interval": 0.5, "sync_interval_steps": 8.0}, 2.0),
        ({"min_round_interval": 5.0, "sync_interval_steps": 8.0}, 5.0),
    ],
)
def test_c13_launch_floor(config: dict[str, float], seconds: float) -> None:
    """Two fragments, ξ_step 0.5 s: H·ξ/F = 8 · 0.5 / 2 = 2 s."""
    driver = Driver(fragments=2, pipeline=2, quorum=2, **config)
    driver.join(0)
    driver.join(1)
    for step, learner in ((0, 0), (0, 1)):
        driver.beat(learner, step)
    driver.now += 1.0
    driver.beat(0, 10)
    driver.beat(1, 2)
    driver.init()
    assert len(pulls(driver.log)) == 1, "the first launch is immediate, the second has a floor"
    driver.wait(seconds - 0.01)
    assert len(pulls(driver.log)) == 1
    driver.wait(0.02)
    assert len(pulls(driver.log)) == 2


def test_c13_an_unknown_step_time_sets_no_floor() -> None:
    driver = Driver(fragments=2, sync_interval_steps=24.0).started(1)
    assert len(pulls(driver.log)) == 2


# ---- C16 to C18


def test_c16_all_captured_answered_completes_at_once() -> None:
    driver = Driver(quorum=1, grace_cap=9.0).started(2)
    driver.push(1, 1, base=0)
    assert driver.step == 0
    driver.push(0, 1, base=0)
    assert driver.step == 1


def test_c16_grace_is_null_when_the_quorum_is_everyone() -> None:
    driver = Driver(quorum=2, total_steps=1).started(2)
    driver.push(0, 1)
    driver.push(1, 1)
    assert driver.records()[0]["grace_ms"] is None


def test_c17_grace_expires() -> None:
    driver = Driver(quorum=1, grace_cap=0.75, total_steps=1).started(3)
    driver.push(2, 1)
    driver.now += 0.5
    driver.push(0, 1)
    assert driver.step == 0
    driver.wait(0.26)
    driver.push(1, 1)
    (record,) = driver.records()
    assert record["responded"] == [0, 2]
    assert record["missed_grace"] == [1]
    assert record["missed_members"] == [{"id": 1, "generation": 1}]
    assert record["grace_ms"] == 750
    assert record["ms"] == 750
    assert record["quorum_ms"] == 0


def test_c17_no_grace_completes_with_the_quorum() -> None:
    driver = Driver(quorum=1, grace_cap=0.0, total_steps=1).started(2)
    driver.push(1, 1)
    assert driver.step == 1
    assert driver.records()[0]["grace_ms"] == 0


def test_c17_ends_early_when_every_living_member_has_answered() -> None:
    driver = Driver(quorum=1, grace_cap=60.0).started(3)
    driver.push(0, 1)
    driver.push(1, 1)
    driver.leave(2)
    assert driver.step == 1
    assert driver.records()[0]["missed_grace"] == [2]


def test_c17_the_last_living_members_answer_ends_it_too() -> None:
    driver = Driver(quorum=1, grace_cap=60.0).started(3)
    driver.leave(2)
    driver.push(0, 1)
    assert driver.step == 0
    driver.push(1, 1)
    assert driver.step == 1


def test_c2_an_answer_that_arrived_before_the_end_counts_however_late_it_is_handled() -> None:
    driver = Driver(quorum=1, grace_cap=1.0, total_steps=1).started(3)
    driver.push(0, 1)
    driver.now += 5
    driver.push(1, 1, arrived=driver.now - 4.5)
    (record,) = driver.records()
    assert record["responded"] == [0, 1]
    late = Driver(quorum=1, grace_cap=1.0, total_steps=1).started(3)
    late.push(0, 1)
    late.now += 5
    late.push(1, 1, arrived=late.now - 3.9)
    assert late.records()[0]["responded"] == [0]


def test_c18_a_superseded_generation_that_is_connected_is_alive() -> None:
    driver = Driver(quorum=2).started(2)
    driver.join(1, generation=2)
    driver.push(0, 1)
    assert not driver.records("attempt_discarded")
    driver.push(1, 1, generation=1)
    assert driver.records()[0]["responded_members"] == [
        {"id": 0, "generation": 1},
        {"id": 1, "generation": 1},
    ]


# ---- C19


def test_c19_a_newer_generation_neither_counts_nor_blocks() -> None:
    driver = Driver(quorum=2, grace_cap=60.0).started(3)
    driver.join(2, generation=9)
    driver.push(0, 1)
    driver.push(2, 1, generation=9)
    assert driver.step == 0
    driver.push(1, 1)
    driver.leave(2, generation=1)
    assert driver.step == 1
    assert driver.records()[0]["rejected"] == {"unexpected_member": 1}
    assert pulls(driver.log)[-1] == (2, 0, 1, [0, 1, 2])
    assert of_type(driver.log, c.SendPull)[-1].members[2] == Member(2, 9)


def test_c19_a_disconnect_erases_no_accepted_answer() -> None:
    driver = Driver(quorum=2, grace_cap=60.0).started(3)
    driver.push(0, 1)
    driver.leave(0)
    driver.push(1, 1)
    driver.leave(2)
    assert driver.step == 1
    assert driver.records()[0]["responded"] == [0, 1]


def test_c19_an_old_generations_disconnect_does_not_remove_the_newer() -> None:
    driver = Driver(quorum=2).started(2)
    driver.join(1, generation=2)
    driver.leave(1, generation=1)
    assert driver.core.members.current() == (Member(0, 1), Member(1, 2))


def test_c19_the_older_generation_does_not_come_back_when_the_newer_leaves() -> None:
    driver = Driver(quorum=3).started(2)
    driver.join(1, generation=2)
    driver.leave(1, generation=2)
    assert driver.core.members.current() == (Member(0, 1),)


def test_c19_a_superseded_group_gets_nothing_any_more() -> None:
    driver = Driver(quorum=2).started(2)
    driver.join(1, generation=2)
    before = len(driver.log)
    driver.push(0, 1)
    driver.push(1, 1)
    for command in driver.log[before:]:
        if isinstance(command, c.SendBroadcast | c.SendPull):
            assert Member(1, 1) not in command.members
            assert Member(1, 2) in command.members


def test_c19_a_superseded_group_is_closed_after_the_stall_timeout() -> None:
    driver = Driver(quorum=3, stall_timeout=5.0)
    driver.join(1)
    driver.join(1, generation=2)
    assert not of_type(driver.wait(4.9), c.CloseGroup)
    (close,) = of_type(driver.wait(0.2), c.CloseGroup)
    assert close.member == Member(1, 1)
    assert close.error is not None
    assert close.error.code is ErrorCode.SUPERSEDED
    driver.join(1, generation=3)
    driver.leave(1, generation=2)
    assert not of_type(driver.wait(60), c.CloseGroup), "it left by itself"


def test_c19_not_while_an_open_attempt_captured_it() -> None:
    driver = Driver(quorum=2, stall_timeout=5.0).started(2)
    driver.join(1, generation=2)
    assert not of_type(driver.wait(60), c.CloseGroup)
    driver.push(0, 1)
    commands = driver.push(1, 1)
    (close,) = of_type(commands, c.CloseGroup)
    assert close.member == Member(1, 1)


# ---- C21 to C23


def test_c21a_the_deadline_discards_and_c22a_the_next_attempt_starts_at_once() -> None:
    driver = Driver(quorum=2, quorum_timeout=10.0).started(2)
    driver.push(0, 1)
    driver.join(2)
    commands = driver.wait(10)
    (drop,) = of_type(commands, c.DropPulls)
    assert (drop.members, drop.step, drop.attempt) == ((Member(1, 1),), 1, 1)
    assert pulls(commands) == [(1, 0, 2, [0, 1, 2])]
    (record,) = driver.records("attempt_discarded")
    assert record["round"] == 1
    assert record["reason"] == "quorum_timeout"
    assert record["responded_members"] == [{"id": 0, "generation": 1}]
    driver.push(1, 1, attempt=2)
    driver.push(2, 1, attempt=2)
    driver.wait(2)
    assert driver.records()[0]["responded"] == [1, 2], "the answer of attempt 1 is gone"


def test_c21a_not_once_the_quorum_answered() -> None:
    driver = Driver(quorum=1, quorum_timeout=10.0, grace_cap=60.0).started(2)
    driver.now += 9
    driver.push(0, 1)
    driver.wait(30)
    assert not driver.records("attempt_discarded")
    driver.push(1, 1)
    assert driver.records()[0]["responded"] == [0, 1]


def test_c21_attempts_have_no_limit_and_reread_the_launch_base() -> None:
    driver = Driver(quorum=2, quorum_timeout=1.0).started(2)
    driver.wait(50.5)
    assert pulls(driver.log)[-1][2] == 51
    driver.push(0, 1, attempt=51)
    driver.push(1, 1, attempt=51)
    assert driver.records()[0]["attempt"] == 51


def test_c21b_unreachable_ends_at_once_and_c22b_waits_for_the_blink() -> None:
    driver = Driver(quorum=2).started(2)
    driver.push(0, 1)
    assert not pulls(driver.leave(1))
    (record,) = driver.records("attempt_discarded")
    assert record["reason"] == "quorum_unreachable"
    assert record["expected_members"] == [{"id": i, "generation": 1} for i in (0, 1)]
    driver.wait(1.0)
    assert pulls(driver.join(1, generation=2)) == [(1, 0, 2, [0, 1])]


def test_c22b_after_less_than_two_seconds() -> None:
    driver = Driver(quorum=2).started(2)
    driver.leave(1)
    assert not pulls(driver.wait(1.49))
    assert pulls(driver.wait(0.02)) == [(1, 0, 2, [0])]


def test_c22b_at_once_when_enough_are_current_already() -> None:
    driver = Driver(quorum=2).started(2)
    driver.join(1, generation=2)
    assert pulls(driver.leave(1, generation=1)) == [(1, 0, 2, [0, 1])]


def test_c22_without_a_group_when_one_is() -> None:
    driver = Driver(quorum=2, quorum_timeout=10.0).started(2)
    driver.leave(0)
    driver.leave(1)
    assert not pulls(driver.wait(100))
    assert pulls(driver.join(1, generation=2)) == [(1, 0, 2, [1])]


def test_c21b_reachable_losses_do_not_end_the_attempt() -> None:
    driver = Driver(quorum=2, grace_cap=0.0).started(3)
    driver.leave(2)
    assert not driver.records("attempt_discarded")
    driver.push(0, 1)
    driver.push(1, 1)
    assert driver.step == 1


def test_c23_a_late_answer_to_a_discarded_attempt_is_out_of_round() -> None:
    driver = Driver(quorum=2, quorum_timeout=5.0, total_steps=1).started(2)
    driver.wait(5)
    driver.push(1, 1, attempt=1)
    driver.push(0, 1, attempt=2)
    driver.push(1, 1, attempt=2)
    assert driver.records()[0]["rejected"] == {"out_of_round": 1}


def test_c22c_zero_weight_retries_after_the_floor_or_100_ms() -> None:
    driver = Driver(quorum=1).started(1)
    driver.push(0, 1, tokens=0)
    (record,) = driver.records("attempt_discarded")
    assert record["reason"] == "zero_weight"
    assert not pulls(driver.wait(0.09))
    assert pulls(driver.wait(0.02)) == [(1, 0, 2, [0])]
    floored = Driver(quorum=1, min_round_interval=3.0).started(1)
    floored.push(0, 1, tokens=0)
    assert not pulls(floored.wait(2.9))
    assert pulls(floored.wait(0.2)) == [(1, 0, 2, [0])]


def test_w45_a_completed_attempt_takes_back_unsent_pulls() -> None:
    driver = Driver(quorum=1, grace_cap=0.0).started(2)
    (drop,) = of_type(driver.push(0, 1), c.DropPulls)
    assert drop.members == (Member(1, 1),)


def test_w39_a_push_before_the_close_counts() -> None:
    driver = Driver(quorum=2).started(2)
    driver.push(1, 1)
    driver.leave(1)
    driver.push(0, 1)
    assert driver.records()[0]["responded"] == [0, 1]


def test_events_of_unknown_groups_change_nothing() -> None:
    driver = Driver(quorum=1).started(1)
    assert driver.push(5, 1) == []
    assert driver.leave(5) == []
    assert driver.beat(5, 10) == []
    assert driver.send(e.CutQueued(Member(5, 1))) == []
    assert driver.step == 0
