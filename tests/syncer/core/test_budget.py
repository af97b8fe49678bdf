"""Budget mode (C70 to C76)."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.snapshot import LedgerEntry
from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from syncer.events import Member
from tests.syncer.core.harness import Driver, FakeResume, of_type
from wire.errors import ErrorCode

N = 40


def running(learners: int = 3, **config: Any) -> Driver:
    fields: dict[str, Any] = {
        "quorum": learners,
        "learners": learners,
        "budget_steps": N,
        "fragments": 2,
    }
    driver = Driver(**(fields | config)).started(learners)
    assert driver.phase in (Phase.RUN, Phase.DRAIN)
    return driver


def commit(driver: Driver, step: int, learners: int = 3) -> None:
    for learner in range(learners):
        driver.push(learner, step)


def test_c72_the_first_report_closes_the_gate_and_discards_whole_rounds() -> None:
    driver = running()
    commit(driver, 1)
    driver.push(0, 2)
    before = len(driver.log)
    driver.report(1, N)
    assert driver.phase is Phase.CUTOFF
    discarded = driver.records("attempt_discarded")
    assert [(r["round"], r["reason"]) for r in discarded] == [(2, "cutoff"), (3, "cutoff")]
    assert len(of_type(driver.log[before:], c.DropPulls)) == 2
    driver.push(1, 2)
    driver.push(2, 2)
    driver.wait(100)
    driver.join(2, generation=2)
    quiet = of_type(driver.log[before:], c.SendPull | c.SendBroadcast | c.StartMerge)
    assert not quiet
    assert driver.step == 1


def test_c72_a_merge_in_progress_is_discarded() -> None:
    driver = running()
    driver.auto = False
    commit(driver, 1)
    driver.report(0, N)
    assert driver.answer_all(c.StartMerge) == []
    assert driver.step == 0


def test_c72_a_commit_that_waits_for_its_checkpoint_is_recorded_not_broadcast() -> None:
    driver = running(checkpoint_every=1)
    driver.auto = False
    commit(driver, 1)
    driver.answer_all(c.StartMerge)
    commands = driver.report(0, N)
    assert [r["step"] for r in driver.records()] == [1]
    assert not of_type(commands, c.SendBroadcast)
    assert driver.answer_all(c.SaveCheckpoint) == []
    driver.report(1, N)
    driver.report(2, N)
    driver.answer_all(c.DrainPool)
    assert driver.saves[-1].snapshot.global_step == 1


def test_c74_after_all_reports_pool_checkpoint_exit() -> None:
    driver = running()
    commit(driver, 1)
    driver.auto = False
    driver.report(2, N)
    driver.report(0, N)
    assert not driver.open_of(c.DrainPool)
    driver.report(1, N)
    driver.answer_all(c.DrainPool)
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.kind is c.SaveKind.RECOVERY
    assert save.snapshot.global_step == 1
    driver.answer_all(c.SaveCheckpoint)
    assert driver.finish == c.Finish(0, "", None, 0)
    (record,) = driver.records("cutoff")
    assert record["checkpoint_step"] == 1
    assert [m["id"] for m in record["members"]] == [0, 1, 2]
    texts = [log.text for log in of_type(driver.log, c.Log)]
    assert "learner-budget cutoff checkpoint written" in texts
    assert not of_type(driver.log, c.SendCut | c.SendShutdown | c.WriteMarker)


def test_c74_in_init_phase_it_waits_for_the_model() -> None:
    driver = Driver(fragments=2, learners=2, quorum=2, budget_steps=N)
    driver.join(0)
    driver.join(1)
    driver.report(1, N)
    assert driver.phase is Phase.CUTOFF
    driver.report(0, N)
    assert not driver.core.finished
    driver.init()
    assert driver.finish.code == 0
    assert driver.saves[-1].snapshot.global_step == 0
    assert not of_type(driver.log, c.SendBroadcast)


def test_c74_the_model_is_waited_for_as_long_as_a_lease() -> None:
    """Learner 0 reports and goes without a model: the others do not wait for ever."""
    driver = Driver(fragments=2, learners=2, quorum=2, budget_steps=N, quorum_timeout=20.0)
    driver.join(0)
    driver.join(1)
    driver.report(0, N)
    driver.report(1, N)
    driver.wait(15)
    driver.beat(0, 7)
    driver.leave(0)
    driver.wait(19)
    assert not driver.core.finished
    driver.wait(1)
    assert driver.finish.code == 1
    assert "learner 0" in driver.finish.reason
    assert "initial model" in driver.finish.reason
    assert not driver.saves


def test_c73_the_model_ends_the_lease_of_learner_0() -> None:
    driver = Driver(fragments=2, learners=2, quorum=2, budget_steps=N, quorum_timeout=20.0)
    driver.join(0)
    driver.join(1)
    driver.report(0, N)
    driver.init()
    for _ in range(10):
        driver.wait(15)
        driver.beat(1, 7)
    assert not driver.core.finished
    driver.report(1, N)
    assert driver.finish.code == 0


@pytest.mark.parametrize("steps", [N - 1, N + 1, 0, None])
def test_c75_a_wrong_report_ends_the_run(steps: int | None) -> None:
    driver = running()
    driver.report(1, steps)
    assert driver.finish.code == 1
    assert "learner 1" in driver.finish.reason
    assert not driver.saves
    assert driver.records("error")


def test_c75_a_duplicate_ends_the_run() -> None:
    driver = running()
    driver.report(1, N)
    driver.leave(1)
    driver.join(1, generation=2)
    driver.report(1, N, generation=2)
    assert driver.finish.code == 1
    assert not driver.saves


def test_c75_a_superseded_generation_ends_the_run() -> None:
    driver = running()
    driver.join(1, generation=2)
    driver.report(1, N, generation=1)
    assert driver.finish.code == 1


def test_c73_an_expired_lease_ends_the_run_without_a_checkpoint() -> None:
    driver = running(quorum_timeout=20.0)
    driver.report(0, N)
    driver.wait(15)
    driver.beat(1, 7)
    driver.wait(4)
    assert not driver.core.finished
    driver.wait(1)
    assert driver.finish.code == 1
    assert "learner 2" in driver.finish.reason
    assert not driver.saves


def test_c73_heartbeat_push_and_hello_renew_a_lease() -> None:
    driver = running(learners=2, quorum_timeout=20.0)
    driver.report(0, N)
    driver.wait(15)
    driver.beat(1, 7)
    driver.wait(15)
    driver.push(1, 1)
    driver.wait(15)
    driver.leave(1)
    driver.join(1, generation=2)
    driver.wait(15)
    assert not driver.core.finished
    driver.report(1, N, generation=2)
    assert driver.finish.code == 0


def test_c73_a_reported_id_needs_no_lease() -> None:
    driver = running(learners=2, quorum_timeout=20.0)
    driver.report(0, N)
    driver.leave(0)
    for _ in range(10):
        driver.wait(15)
        driver.beat(1, 7)
    assert not driver.core.finished


def test_c73_a_report_ends_a_renewed_lease() -> None:
    driver = running(quorum_timeout=20.0)
    driver.report(0, N)
    driver.wait(5)
    driver.beat(1, 9)
    driver.report(1, N)
    for _ in range(10):
        driver.beat(2, 9)
        driver.wait(15)
    assert not driver.core.finished


def test_c75_a_poisoned_pool_ends_the_run() -> None:
    driver = running(learners=1)
    driver.auto = False
    driver.report(0, N)
    driver.send(e.Failure("SVD worker: no answer"))
    assert driver.finish.code == 1
    assert not driver.saves


def test_c75_t_without_a_report_is_a_checkpoint_and_exit_1() -> None:
    driver = running(total_steps=2)
    commit(driver, 1)
    driver.auto = False
    commit(driver, 2)
    driver.answer_all(c.StartMerge)
    driver.answer_all(c.DrainPool)
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.snapshot.global_step == 2
    driver.answer_all(c.SaveCheckpoint)
    assert driver.finish.code == 1
    assert not of_type(driver.log, c.SendCut)


def test_c35_the_cutoff_checkpoint_is_tried_again() -> None:
    driver = running(learners=1)
    driver.auto = False
    driver.report(0, N)
    driver.answer_all(c.DrainPool)
    driver.fail_save()
    driver.auto = True
    driver.wait(1)
    assert driver.finish.code == 0


def test_c86_budget_done_with_the_mode_off_is_a_fault() -> None:
    driver = Driver(quorum=1).started(2)
    for learner, steps in ((0, N), (1, None)):
        (close,) = of_type(driver.report(learner, steps), c.CloseGroup)
        assert close.member == Member(learner, 1)
        assert close.error is not None
        assert close.error.code is ErrorCode.BUDGET_OFF
    assert driver.phase is Phase.RUN


def test_c76_consolidation_is_an_ordinary_resumed_run() -> None:
    """quorum = M, total-steps = C + F, H = 0: all M answer each of the F rounds."""
    step, fragments, learners = 7, 3, 2
    driver = Driver(
        fragments=fragments,
        resumed=FakeResume(step, fragments, {0: LedgerEntry(7, 7, 7)}),
        quorum=learners,
        learners=learners,
        total_steps=step + fragments,
        pipeline=3,
        mark_final=True,
        checkpoint_every=1,
    )
    driver.join(1)
    driver.join(0)
    for t in (10, 8, 9):
        for learner in (1, 0):
            driver.push(learner, t, local_step=N, steps=N, tokens=400)
    records = driver.records()
    assert [r["step"] for r in records] == [8, 9, 10]
    assert all(r["responded"] == [0, 1] for r in records)
    for learner in (0, 1):
        driver.ack(learner, 10)
    assert driver.finish.code == 0
    assert of_type(driver.log, c.WriteMarker)
