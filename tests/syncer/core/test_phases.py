"""Phases and memory of the core (C1, C3, C86, C87)."""

from __future__ import annotations

import gc
import weakref

import torch

from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from syncer.events import Member
from tests.syncer.core.harness import CONTRACT, PRINT, Driver, FakeResume, of_type
from wire.messages import Hello, PushFragment


def phases(driver: Driver) -> list[Phase]:
    """Remember every phase that a `handle` call ends in."""
    seen = [driver.phase]
    handle = driver.core.handle

    def watched(event: e.Event, now: float) -> list[c.Command]:
        out = handle(event, now)
        if driver.phase is not seen[-1]:
            seen.append(driver.phase)
        return out

    driver.core.handle = watched  # type: ignore[method-assign]
    return seen


def test_c3_the_phases_of_a_run() -> None:
    driver = Driver(fragments=2, pipeline=1, quorum=1, total_steps=2, mark_final=True, auto=False)
    seen = phases(driver)

    def settle() -> None:
        while driver.open_tasks:
            driver.answer(next(iter(driver.open_tasks)))

    driver.started(1)
    settle()
    for step in (1, 2):
        driver.push(0, step)
        settle()
    driver.send(e.CutQueued(Member(0, 1)))
    driver.ack(0, 2)
    settle()
    assert seen == [
        Phase.INIT,
        Phase.RUN,
        Phase.DRAIN,
        Phase.FREEZE,
        Phase.DELIVER,
        Phase.DONE,
        Phase.FINISHED,
    ]


def test_c3_budget_mode_goes_to_cutoff_from_init_or_run() -> None:
    from_init = Driver(learners=2, quorum=2, budget_steps=3)
    seen = phases(from_init)
    from_init.join(0)
    from_init.report(0, 3)
    assert seen == [Phase.INIT, Phase.CUTOFF]
    from_run = Driver(learners=2, quorum=2, budget_steps=3)
    seen = phases(from_run)
    from_run.started(2)
    from_run.report(1, 3)
    assert seen == [Phase.INIT, Phase.RUN, Phase.CUTOFF]


def test_c86_pushes_acks_and_inits_by_phase() -> None:
    """What is dropped where; the other cells of the table have tests of their own."""
    driver = Driver(quorum=2)
    driver.join(0)
    assert driver.push(0, 1) == driver.ack(0, 0) == []
    driver.init()
    driver.join(1)
    assert driver.phase is Phase.RUN
    assert driver.init() == driver.ack(0, 0) == []
    for learner in (0, 1):
        driver.push(learner, 1)
    driver.signal()
    assert driver.phase is Phase.DRAIN
    assert driver.init() == driver.ack(0, 1) == []
    for learner in (0, 1):
        driver.push(learner, 2)
    assert driver.phase is Phase.DELIVER
    assert driver.init() == driver.push(0, 3) == driver.beat(0, 3) == []
    assert driver.core.dropped == {"final_ack": 3, "init": 3}


def test_c71_a_report_counts_by_the_groups_identity_once() -> None:
    driver = Driver(learners=2, quorum=2, budget_steps=3).started(2)
    driver.join(1, generation=2)
    driver.report(1, 3, generation=2)
    driver.leave(1, generation=2)
    driver.report(0, 3)
    assert driver.finish.code == 0
    assert driver.records("cutoff")[0]["members"] == [
        {"id": 0, "generation": 1},
        {"id": 1, "generation": 2},
    ]


def test_c87_responses_keep_the_payload_as_it_came_and_let_it_go() -> None:
    driver = Driver(fragments=2, pipeline=2, quorum=1).started(1)
    driver.auto = False
    owner = bytearray(8)
    payload = memoryview(owner)
    push = PushFragment(0, 1, 2, 1, 0, 1, 1, 5, payload)
    driver.send(e.PushReceived(Member(0, 1), push, driver.now))
    (merge,) = driver.open_of(c.StartMerge)
    assert merge.job.responses[0].payload is payload, "no copy"
    driver.answer(merge.ticket)
    assert driver.step == 0, "round 2 waits for its turn"
    del merge, push
    driver.log.clear()
    driver.events.clear()
    payload.release()
    owner.append(0)  # a live view of it anywhere would forbid this


class OneTensor(FakeResume):
    """A checkpoint whose tensors can be watched."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(1, 1, {0: LedgerEntry(1, 1, 1)})
        self.values = values

    def snapshot_for(self, wanted: Hello) -> Snapshot:
        state = FragmentState(1, self.values, torch.zeros(2))
        return Snapshot(0, PRINT, CONTRACT, 1, (state,), self.ledger)


def test_c87_a_resumed_file_is_let_go_once_its_state_is_replaced() -> None:
    values = torch.zeros(2)
    watched = weakref.ref(values)
    driver = Driver(resumed=OneTensor(values), quorum=1)
    del values
    driver.join(0)
    assert driver.phase is Phase.RUN
    driver.push(0, 2, base=1)
    assert driver.step == 2
    driver.log.clear()
    gc.collect()
    assert watched() is None


def test_c1_commands_of_one_commit_come_in_one_answer_and_in_order() -> None:
    driver = Driver(fragments=2, pipeline=2, quorum=1).started(1)
    driver.auto = False
    driver.push(0, 2)
    driver.push(0, 1)
    second, first = driver.open_of(c.StartMerge)
    driver.answer(second.ticket)
    out = driver.answer(first.ticket)
    kinds = [type(command) for command in out]
    assert kinds == [
        c.SendBroadcast, c.WriteTape, c.SendBroadcast, c.WriteTape, c.SendPull, c.SendPull,
    ]  # fmt: skip
    assert [pull.step for pull in of_type(out, c.SendPull)] == [3, 4]
