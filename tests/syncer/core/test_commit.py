"""Merge, commit, broadcast, checkpoints and their failures (C30 to C37)."""

from __future__ import annotations

from dataclasses import replace

from syncer import commands as c
from syncer import events as e
from syncer.commands import SaveKind
from syncer.coordinator import Phase
from syncer.events import Member
from tests.syncer.core.harness import Driver, fake_merge, of_type, version_at
from wire.errors import ErrorCode


def names(commands: list[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands if not isinstance(command, c.Log)]


def two_rounds(**config: object) -> Driver:
    """Rounds 1 and 2 of two fragments, both gathered and computing."""
    driver = Driver(fragments=2, quorum=1, **config).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.push(0, 2)
    return driver


# ---- C30, C31


def test_c30_several_rounds_compute_at_once_and_touch_nothing() -> None:
    driver = two_rounds()
    assert len(driver.open_of(c.StartMerge)) == 2
    assert driver.step == 0


def test_c30_the_job_owns_its_inputs_in_member_order() -> None:
    driver = Driver(quorum=3, equal_weights=True, outer_lr=0.3, heloco=False)
    for learner in (2, 1, 0):
        driver.join(learner)
    driver.init()
    driver.auto = False
    for learner in (1, 2, 0):
        driver.push(learner, 1, tokens=7, steps=3)
    (merge,) = driver.open_of(c.StartMerge)
    assert [r.member.learner_id for r in merge.job.responses] == [0, 1, 2]
    assert [(r.c_tokens, r.c_steps) for r in merge.job.responses] == [(7, 3)] * 3
    assert merge.job.settings.lr == 0.3
    assert merge.job.settings.equal_weights
    assert not merge.job.settings.heloco


def test_n19_each_fragment_has_its_own_rate() -> None:
    driver = two_rounds(outer_lr_by_fragment=(0.5, 0.25))
    assert [task.job.settings.lr for task in driver.open_of(c.StartMerge)] == [0.5, 0.25]


def test_c31_an_early_result_waits_for_its_turn() -> None:
    driver = two_rounds()
    first, second = driver.open_of(c.StartMerge)
    assert driver.answer(second.ticket) == []
    assert driver.step == 0
    commands = driver.answer(first.ticket)
    assert driver.step == 2
    assert [b.version for b in of_type(commands, c.SendBroadcast)] == [1, 2]
    assert [r["step"] for r in driver.records()] == [1, 2]


# ---- C32


def test_c32_every_one_is_durable_before_the_broadcast_before_the_tape() -> None:
    driver = Driver(quorum=1, checkpoint_every=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    commands = driver.answer_all(c.StartMerge)
    assert names(commands) == ["SaveCheckpoint"]
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.kind is SaveKind.PERIODIC
    assert save.patch
    assert save.snapshot.global_step == 1
    commands = driver.answer(save.ticket)
    assert names(commands) == ["SendBroadcast", "WriteTape", "SendPull"]


def test_c32_every_n_saves_in_the_background_after_the_tape() -> None:
    driver = Driver(quorum=1, checkpoint_every=2).started(1)
    driver.auto = False
    driver.push(0, 1)
    assert names(driver.answer_all(c.StartMerge)) == ["SendBroadcast", "WriteTape", "SendPull"]
    driver.push(0, 2)
    commands = driver.answer_all(c.StartMerge)
    assert names(commands) == ["SendBroadcast", "WriteTape", "SaveCheckpoint", "SendPull"]
    (save,) = driver.open_of(c.SaveCheckpoint)
    driver.push(0, 3)
    driver.answer_all(c.StartMerge)
    assert driver.step == 3, "the run goes on while the disk works"
    assert save.snapshot.global_step == 2
    assert save.snapshot.fragments[0].version == 2, "an immutable cut"
    assert save.snapshot.ledger[0].merges == 2


def test_c32_a_later_checkpoint_waits_for_an_earlier_one() -> None:
    driver = Driver(quorum=1, checkpoint_every=2).started(1)
    driver.auto = False
    for step in range(1, 9):
        driver.push(0, step)
        driver.answer_all(c.StartMerge)
        assert len(driver.open_of(c.SaveCheckpoint)) <= 1
    assert driver.step == 8
    driver.answer_all(c.SaveCheckpoint)
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.snapshot.global_step == 8, "only the newest waiting cut is worth writing"


def test_c32_every_zero_writes_only_the_final_one() -> None:
    driver = Driver(quorum=1, checkpoint_every=0, total_steps=5).started(1)
    for step in range(1, 6):
        driver.push(0, step)
    assert [save.kind for save in driver.saves] == [SaveKind.TERMINAL]


def test_c32_the_terminal_round_is_not_broadcast() -> None:
    driver = Driver(quorum=1, total_steps=2).started(1)
    assert "SendBroadcast" in names(driver.push(0, 1))
    assert "SendBroadcast" not in names(driver.push(0, 2))


def test_c32_after_a_stop_the_highest_launched_is_terminal() -> None:
    driver = Driver(fragments=3, pipeline=2, quorum=1).started(1)
    driver.signal()
    assert "SendBroadcast" in names(driver.push(0, 1))
    assert "SendBroadcast" not in names(driver.push(0, 2))
    assert driver.phase is Phase.DELIVER


def test_c32_versions_follow_the_round_robin() -> None:
    driver = Driver(fragments=3, quorum=1, checkpoint_every=1, total_steps=10).started(1)
    for step in range(1, 11):
        driver.push(0, step)
    for save in driver.saves:
        step = save.snapshot.global_step
        versions = [state.version for state in save.snapshot.fragments]
        assert versions == [version_at(step, p, 3) for p in range(3)]


def test_n21_the_ledger_saturates() -> None:
    driver = Driver(quorum=1, total_steps=2).started(1)
    driver.push(0, 1, tokens=2**64 - 1, steps=5)
    driver.push(0, 2, tokens=2**64 - 1, steps=6)
    assert driver.saves[-1].snapshot.ledger == {0: (2, 11, 2**64 - 1)}


# ---- C33, C34


def test_c33_no_momentum_only_step() -> None:
    driver = Driver(quorum=2).started(2)
    driver.push(0, 1, tokens=0)
    commands = driver.push(1, 1, tokens=0)
    assert not of_type(commands, c.StartMerge)
    assert driver.step == 0
    assert driver.records("attempt_discarded")[0]["reason"] == "zero_weight"


def test_c33_one_learner_with_weight_is_enough() -> None:
    driver = Driver(quorum=2).started(2)
    driver.push(0, 1, tokens=0)
    driver.push(1, 1)
    assert driver.step == 1


def overflow(driver: Driver, largest: Member) -> list[c.Command]:
    (merge,) = driver.open_of(c.StartMerge)
    del driver.open_tasks[merge.ticket]
    return driver.send(e.MergeRefused(merge.ticket, largest))


def test_c34_the_largest_gradient_is_closed_and_the_round_tried_again() -> None:
    driver = Driver(quorum=2).started(3)
    driver.auto = False
    for learner in range(3):
        driver.push(learner, 1)
    commands = overflow(driver, Member(1, 1))
    (close,) = of_type(commands, c.CloseGroup)
    assert close.member == Member(1, 1)
    assert close.error is not None
    assert close.error.code is ErrorCode.OVERFLOW
    assert driver.step == 0
    assert driver.records("attempt_discarded")[0]["reason"] == "non_finite"
    assert not of_type(driver.wait(0.09), c.SendPull)
    (pull,) = of_type(driver.wait(0.02), c.SendPull)
    assert pull.members == (Member(0, 1), Member(2, 1))
    assert driver.leave(1) == [], "its sockets are gone now"


def test_c34_one_bad_learner_that_comes_back_costs_attempts_not_the_run() -> None:
    driver = Driver(quorum=1).started(1)
    for attempt in range(1, 10):
        driver.auto = False
        driver.push(0, 1, attempt=attempt, generation=attempt)
        overflow(driver, Member(0, attempt))
        driver.leave(0, generation=attempt)
        driver.join(0, generation=attempt + 1)
        driver.wait(0.2)
    assert driver.phase is Phase.RUN


def test_c34_three_different_ids_for_one_round_end_the_run() -> None:
    driver = Driver(quorum=1, grace_cap=0.0, checkpoint_every=0).started(4)
    driver.auto = False
    for attempt, learner in enumerate((0, 1, 2), 1):
        driver.push(learner, 1, attempt=attempt)
        overflow(driver, Member(learner, 1))
        driver.wait(0.2)
    assert driver.finish.code == 1
    assert "0, 1, 2" in driver.finish.reason
    assert len(of_type(driver.log, c.CloseGroup)) == 3
    assert not driver.saves
    assert driver.records("error")[0]["error"] == driver.finish.reason


def test_c34_a_round_that_commits_forgets_who_was_closed() -> None:
    driver = Driver(quorum=1, grace_cap=0.0).started(5)
    for step in range(1, 5):
        driver.auto = False
        driver.push(step, step)
        overflow(driver, Member(step, 1))
        driver.auto = True
        driver.wait(0.2)
        driver.push(0, step, attempt=2)
        assert driver.step == step


# ---- C35


def test_c35_commits_and_broadcasts_are_withheld_gathering_goes_on() -> None:
    driver = two_rounds(checkpoint_every=1, quorum_timeout=900.0)
    driver.answer_all(c.StartMerge)
    commands = driver.fail_save("No space left on device")
    (log,) = of_type(commands, c.Log)
    assert "No space left on device" in log.text
    assert log.level == "error"
    assert names(commands) == []
    assert driver.push(0, 2) == []
    assert driver.beat(0, 5) == []
    assert of_type(driver.join(1), c.SendBroadcast)[0].version == 0, "not what is not durable"
    pauses = []
    for _ in range(8):
        before = driver.now
        deadline = driver.core.next_deadline()
        assert deadline is not None
        driver.wait(deadline - driver.now)
        (save,) = driver.open_of(c.SaveCheckpoint)
        assert not save.patch, "written again in full"
        pauses.append(driver.now - before)
        assert not of_type(driver.fail_save(), c.SendBroadcast)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    driver.wait(31)
    commands = driver.answer_all(c.SaveCheckpoint)
    assert names(commands)[:3] == ["SendBroadcast", "WriteTape", "SaveCheckpoint"]
    driver.answer_all(c.SaveCheckpoint)
    assert driver.step == 2


def test_c35_the_next_failure_starts_again_at_one_second() -> None:
    driver = Driver(quorum=1, checkpoint_every=1).started(1)
    for step in (1, 2):
        driver.auto = False
        driver.push(0, step)
        driver.answer_all(c.StartMerge)
        driver.fail_save()
        assert driver.core.next_deadline() == driver.now + 1
        driver.auto = True
        driver.wait(1)
        assert driver.step == step


def test_c35_given_up_after_the_quorum_timeout() -> None:
    driver = Driver(quorum=1, checkpoint_every=1, quorum_timeout=10.0).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.answer_all(c.StartMerge)
    started = driver.now
    while not driver.core.finished:
        if driver.open_of(c.SaveCheckpoint):
            driver.fail_save()
        deadline = driver.core.next_deadline()
        assert deadline is not None
        driver.wait(deadline - driver.now)
    assert driver.now == started + 10
    assert driver.finish.code == 1
    assert "intact" in driver.finish.reason
    assert driver.finish.error is None, "learners stay and meet the restarted syncer"


def test_c35_a_failed_background_save_withholds_commits_too() -> None:
    driver = Driver(quorum=1, checkpoint_every=2).started(1)
    driver.auto = False
    for step in (1, 2):
        driver.push(0, step)
        driver.answer_all(c.StartMerge)
    driver.fail_save()
    driver.push(0, 3)
    assert driver.answer_all(c.StartMerge) == []
    assert driver.step == 2
    driver.wait(1)
    commands = driver.answer_all(c.SaveCheckpoint)
    assert driver.step == 3
    assert names(commands) == ["SendBroadcast", "WriteTape", "SendPull"]


def test_c35_a_failed_tape_ends_the_run() -> None:
    driver = Driver(quorum=1).started(1)
    driver.send(e.Failure("the event tape cannot be written: disk full"))
    assert driver.finish.code == 1
    assert "tape" in driver.finish.reason
    assert driver.push(0, 1) == []
    assert driver.core.next_deadline() is None


# ---- C36, C37


def test_c36_no_broadcast_after_the_freeze() -> None:
    driver = Driver(quorum=1, total_steps=1).started(1)
    driver.push(0, 1)
    assert driver.phase is Phase.DELIVER
    assert not of_type(driver.join(1), c.SendBroadcast)


def test_c37_a_joiner_gets_every_fragment_at_its_current_version() -> None:
    driver = Driver(fragments=3, pipeline=1, quorum=1).started(1)
    for step in range(1, 6):
        driver.push(0, step)
    commands = driver.join(9)
    assert [(b.fragment, b.version) for b in of_type(commands, c.SendBroadcast)] == [
        (0, 4),
        (1, 5),
        (2, 3),
    ]
    assert not of_type(commands, c.SendPull), "no PULL is replayed"
    assert of_type(driver.push(0, 6), c.SendPull)[0].members == (Member(0, 1), Member(9, 1))


def test_c37_in_drain_while_there_are_steps_to_do() -> None:
    driver = Driver(fragments=2, quorum=1, total_steps=2).started(1)
    assert driver.phase is Phase.DRAIN
    assert len(of_type(driver.join(1), c.SendBroadcast)) == 2


def test_c37_a_joiner_does_not_see_what_is_not_durable() -> None:
    driver = Driver(quorum=1, checkpoint_every=1).started(1)
    driver.auto = False
    driver.push(0, 1)
    driver.answer_all(c.StartMerge)
    (early,) = of_type(driver.join(1), c.SendBroadcast)
    assert early.version == 0
    (late,) = of_type(driver.answer_all(c.SaveCheckpoint), c.SendBroadcast)
    assert late.version == 1
    assert late.members == (Member(0, 1), Member(1, 1))


def test_c1_a_stale_answer_is_ignored() -> None:
    driver = Driver(quorum=2).started(2)
    driver.auto = False
    driver.push(0, 1)
    driver.push(1, 1)
    (merge,) = driver.open_of(c.StartMerge)
    driver.answer(merge.ticket)
    again = e.MergeDone(merge.ticket, replace(fake_merge(merge.job), gnorm=2.0), 0.0)
    assert driver.send(again) == []
    assert driver.send(e.SaveDone(4711)) == []
    assert driver.step == 1
