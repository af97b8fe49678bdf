"""Whole runs under a simulated clock: fresh, resumed, budget, with losses, and at scale."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from checkpoint.snapshot import LedgerEntry, Snapshot
from syncer import commands as c
from syncer import events as e
from tests.syncer.core.harness import FakeGate, FakeResume, version_at
from tests.syncer.core.simulation import Simulation
from wire.messages import Hello


def connected(simulation: Simulation) -> Simulation:
    for learner in simulation.learners:
        simulation.connect(learner.learner_id)
    return simulation


def test_a_fresh_run_from_start_to_shutdown() -> None:
    simulation = connected(
        Simulation(
            3,
            fragments=4,
            quorum=3,
            pipeline=2,
            total_steps=40,
            checkpoint_every=1,
            mark_final=True,
        )
    )
    finish = simulation.run(until=1000)
    assert finish is not None
    assert finish.code == 0
    assert [r["step"] for r in simulation.commits] == list(range(1, 41))
    assert all(r["responded"] == [0, 1, 2] for r in simulation.commits)
    final = simulation.saves[-1].snapshot
    assert [state.version for state in final.fragments] == [37, 38, 39, 40]
    assert final.ledger[2].merges == 40
    assert all(float(state.params[0]) == 10 for state in final.fragments)
    simulation.finish = None
    simulation.run(until=2000)
    assert all(learner.shut_down for learner in simulation.learners)


def test_a_slow_learner_costs_the_grace_and_no_more() -> None:
    simulation = Simulation(4, fragments=2, quorum=3, total_steps=20, grace_cap=0.3)
    simulation.learners[3].pace = 50.0
    connected(simulation)
    finish = simulation.run(until=200)
    assert finish is not None
    slow = [r for r in simulation.commits if 3 in r["responded"]]
    assert len(slow) <= 1
    assert all(r["ms"] <= 800 for r in simulation.commits)
    assert all(r["missed_grace"] == [3] for r in simulation.commits if r not in slow)


def test_a_killed_learner_costs_at_most_two_seconds() -> None:
    simulation = Simulation(3, fragments=2, quorum=3, total_steps=60)
    simulation.learners[1].pace = 0.7
    connected(simulation)
    simulation.at(3.0, lambda: simulation.disconnect(1))
    finish = simulation.run(until=200)
    assert finish is not None
    assert finish.code == 0
    discarded = [r for r in simulation.records if r.get("event") == "attempt_discarded"]
    assert {r["reason"] for r in discarded} == {"quorum_unreachable"}
    assert max(r["ms"] for r in simulation.commits) < 2500
    assert simulation.commits[-1]["responded"] == [0, 2]


def test_a_reconnect_storm_loses_no_round() -> None:
    simulation = Simulation(3, fragments=3, quorum=2, pipeline=3, total_steps=200)
    connected(simulation)

    def blink() -> None:
        simulation.disconnect(2)
        simulation.connect(2)
        if simulation.now < 12:
            simulation.at(0.02, blink)

    simulation.at(1.0, blink)
    finish = simulation.run(until=400)
    assert finish is not None
    assert finish.code == 0
    assert [r["step"] for r in simulation.commits] == list(range(1, 201))
    assert len(simulation.core.members) == 3


def test_a_resumed_run_begins_at_the_first_uncommitted_step() -> None:
    resume = FakeResume(17, 5, {0: LedgerEntry(17, 17, 170)})
    simulation = connected(
        Simulation(2, fragments=5, quorum=2, resumed=resume, total_steps=30, checkpoint_every=1)
    )
    finish = simulation.run(until=400)
    assert finish is not None
    assert [r["step"] for r in simulation.commits] == list(range(18, 31))
    for save in simulation.saves:
        step = save.snapshot.global_step
        versions = [state.version for state in save.snapshot.fragments]
        assert versions == [version_at(step, p, 5) for p in range(5)]


@dataclass
class Saved:
    """A checkpoint as the next process finds it."""

    snapshot: Snapshot

    @property
    def global_step(self) -> int:
        return self.snapshot.global_step

    @property
    def ledger_ids(self) -> list[int]:
        return list(self.snapshot.ledger)

    @property
    def gate(self) -> FakeGate:
        return FakeGate(len(self.snapshot.fragments), self.snapshot.contract)

    def snapshot_for(self, wanted: Hello) -> Snapshot:
        return self.snapshot


def test_a_budget_benchmark_in_its_two_processes() -> None:
    learners, fragments, budget = 3, 4, 50
    cutoff = connected(
        Simulation(
            learners, fragments=fragments, quorum=2, learners=learners, budget_steps=budget,
            pipeline=2, quorum_timeout=60.0,
        )
    )  # fmt: skip

    def report(learner_id: int) -> None:
        learner = cutoff.learners[learner_id]
        cutoff.send(e.BudgetDoneReceived(e.Member(learner_id, learner.generation), budget))

    for learner_id, seconds in ((1, 5.0), (0, 5.2), (2, 7.0)):
        cutoff.at(seconds, lambda learner_id=learner_id: report(learner_id))
    finish = cutoff.run(until=100)
    assert finish is not None
    assert finish.code == 0
    last = cutoff.saves[-1]
    assert last.kind is c.SaveKind.RECOVERY
    step = last.snapshot.global_step
    assert step == cutoff.commits[-1]["step"] > 0

    consolidation = connected(
        Simulation(
            learners, fragments=fragments, quorum=learners, learners=learners, pipeline=4,
            total_steps=step + fragments, resumed=Saved(last.snapshot), mark_final=True,
        )
    )  # fmt: skip
    finish = consolidation.run(until=100)
    assert finish is not None
    assert finish.code == 0
    assert [r["step"] for r in consolidation.commits] == list(range(step + 1, step + fragments + 1))
    assert all(r["responded"] == [0, 1, 2] for r in consolidation.commits)


def test_learners_that_only_leave_and_never_come_back_end_in_the_stop_bound() -> None:
    simulation = connected(Simulation(2, quorum=2, quorum_timeout=20.0))
    simulation.at(2.0, lambda: simulation.disconnect(0))
    simulation.at(2.1, lambda: simulation.disconnect(1))
    simulation.at(5.0, lambda: simulation.send(e.StopSignal()))
    finish = simulation.run(until=100)
    assert finish is not None
    assert finish.code == 0
    assert simulation.now == 25.001 + simulation.save_seconds


def many(learners: int) -> None:
    simulation = Simulation(learners, fragments=4, quorum=learners * 3 // 4, total_steps=8)
    connected(simulation)
    finish = simulation.run(until=100)
    assert finish is not None
    assert finish.code == 0
    assert len(simulation.commits) == 8
    assert simulation.pulls == 8 * learners
    assert simulation.events < 12 * learners + 100


def test_hundreds_of_learners_in_simulated_time() -> None:
    many(300)


@pytest.mark.slow
def test_five_thousand_learners_in_simulated_time() -> None:
    many(5000)
