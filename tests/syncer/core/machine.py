"""A stateful model that drives the core at random, with a `Watcher` beside it (C1 to C83).

Only to predict a refusal of C20 does it look at the attempts inside the core.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from checkpoint.snapshot import LedgerEntry
from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from syncer.events import Member
from syncer.rounds import Attempt, Round, Status
from tests.syncer.core.harness import Driver, FakeResume, fake_merge, hello, vector
from tests.syncer.core.watcher import Watcher, state_of
from wire.messages import PushFragment

LEARNERS = 4
BUDGET = 9
IDS = st.integers(0, LEARNERS - 1)


class CoreMachine(RuleBasedStateMachine):
    """Random joins, losses, pushes, results, failures, signals, acknowledgements, time."""

    @initialize(
        fragments=st.integers(1, 4),
        pipeline=st.integers(1, 4),
        quorum=st.integers(1, 3),
        every=st.sampled_from([0, 1, 1, 2, 3]),
        total=st.sampled_from([None, None, 2, 5, 12]),
        resumed=st.sampled_from([0, 0, 0, 1, 5]),
        lag=st.sampled_from([None, None, 0, 3]),
        grace=st.sampled_from([0.0, 1.0, 5.0]),
        interval=st.sampled_from([0.0, 0.0, 0.5]),
        mark=st.booleans(),
        budget=st.sampled_from([None, None, None, None, None, BUDGET]),
        started=st.sampled_from([LEARNERS, LEARNERS, 3, 2, 0]),
    )
    def begin(
        self,
        fragments: int,
        pipeline: int,
        quorum: int,
        every: int,
        total: int | None,
        resumed: int,
        lag: int | None,
        grace: float,
        interval: float,
        mark: bool,
        budget: int | None,
        started: int,
    ) -> None:
        if total is not None:
            resumed = min(resumed, total)
        if budget is not None:
            resumed, mark = 0, False
        ledger = {0: LedgerEntry(1, 1, 1)}
        self.driver = Driver(
            fragments=fragments,
            resumed=FakeResume(resumed, fragments, ledger) if resumed else None,
            auto=False,
            learners=LEARNERS,
            quorum=quorum,
            pipeline=pipeline,
            checkpoint_every=every,
            total_steps=total,
            max_base_lag=lag,
            grace_cap=grace,
            min_round_interval=interval,
            mark_final=mark,
            final_state=mark,
            budget_steps=budget,
            quorum_timeout=20.0,
            final_ack_timeout=40.0,
            stall_timeout=5.0,
        )
        self.budget = budget
        self.watcher = Watcher(self.driver, min(pipeline, fragments), resumed + 1)
        self.generation = 0
        for learner in range(started if budget is None else LEARNERS):
            self.join(learner)
        if started:
            self.init()
            self._settle_tasks()

    def send(self, event: e.Event) -> list[c.Command]:
        """One event; the watcher sees every command."""
        before = self.driver.phase
        out = self.driver.send(event)
        for command in out:
            self.watcher.saw(command)
        if self.driver.phase is Phase.CUTOFF and before is not Phase.CUTOFF:
            self.watcher.quiet = True
        return out

    @property
    def over(self) -> bool:
        return self.driver.core.finished

    # ---- groups

    @precondition(lambda self: not self.over)
    @rule(learner=IDS)
    def join(self, learner: int) -> None:
        self.generation += 1
        self.driver.token += 1
        wanted_by = self.driver.token
        wanted = hello(learner, self.generation, self.driver.fragments)
        out = self.send(e.HelloReceived(wanted_by, wanted))
        assert any(isinstance(command, c.AcceptHello) for command in out)

    def _some_group(self, data: st.DataObject) -> Member | None:
        live = [
            Member(learner, generation)
            for learner, generations in sorted(self.watcher.live.items())
            for generation in generations
        ]
        return data.draw(st.sampled_from(live)) if live else None

    @precondition(lambda self: not self.over)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = self._some_group(data)
        if member is not None:
            self.watcher.left(member)
            self.send(e.GroupClosed(member))

    @precondition(lambda self: not self.over and 0 in self.watcher.current)
    @rule()
    def init(self) -> None:
        member = Member(0, self.watcher.current[0])
        for fragment in range(self.driver.fragments):
            if not self.over:
                self.send(e.InitReceived(member, fragment, b"\0" * 8))

    # ---- pushes

    def _open(self) -> list[tuple[Round, Attempt]]:
        scheduler = self.driver.core._scheduler
        if scheduler is None or self.driver.phase not in (Phase.RUN, Phase.DRAIN):
            return []
        return [
            (round_, round_.attempt)
            for round_ in scheduler._rounds.values()
            if round_.status is Status.GATHERING and round_.attempt is not None
        ]

    @precondition(lambda self: not self.over and self._open())
    @rule(data=st.data(), tokens=st.sampled_from([0, 1, 50, 50, 50]))
    def answer(self, data: st.DataObject, tokens: int) -> None:
        """A valid answer of a captured, living member."""
        round_, attempt = data.draw(st.sampled_from(self._open()))
        if not attempt.silent:
            return
        member = data.draw(st.sampled_from(sorted(attempt.silent)))
        self._push(member, round_.step, attempt.number, attempt.launch_base, tokens)

    @precondition(lambda self: not self.over and self._open())
    @rule(tokens=st.sampled_from([1, 50]))
    def everyone_answers(self, tokens: int) -> None:
        """All captured members of the oldest open attempt answer."""
        round_, attempt = self._open()[0]
        for member in sorted(attempt.silent):
            if not self.over:
                self._push(member, round_.step, attempt.number, attempt.launch_base, tokens)

    @precondition(lambda self: not self.over)
    @rule(
        data=st.data(),
        step=st.integers(0, 20),
        attempt=st.integers(1, 3),
        base=st.integers(0, 20),
        fragment=st.integers(0, 3),
    )
    def any_push(
        self, data: st.DataObject, step: int, attempt: int, base: int, fragment: int
    ) -> None:
        """Valid, late, duplicate, of a wrong base or fragment, stale: refused without a trace."""
        member = self._some_group(data)
        if member is None:
            return
        opened = self._open()
        if opened and data.draw(st.booleans()):
            round_, current = data.draw(st.sampled_from(opened))
            step, attempt, fragment = round_.step, current.number, round_.fragment
        self._push(member, step, attempt, base, 10, fragment % self.driver.fragments)

    def _push(
        self,
        member: Member,
        step: int,
        attempt: int,
        base: int,
        tokens: int,
        fragment: int | None = None,
    ) -> None:
        if fragment is None:
            fragment = (step - 1) % self.driver.fragments
        reason = self._refusal(member, step, attempt, base, fragment)
        push = PushFragment(
            member.learner_id, fragment, step, attempt, base, 1, 1, tokens, b"\0" * 8
        )
        event = e.PushReceived(member, push, self.driver.now)
        if reason is None:
            self.watcher.pushed.add((member, step, attempt))
            self.send(event)
            return
        before, counts = state_of(self.driver.core), dict(self.driver.core._ctx._rejected)
        assert self.send(event) == [], "silent"
        assert state_of(self.driver.core) == before, "a dropped PUSH changes nothing"
        if reason:
            counts[reason] = counts.get(reason, 0) + 1
            assert self.driver.core._ctx._rejected == counts, f"but it is counted as {reason}"

    def _refusal(
        self, member: Member, step: int, attempt: int, base: int, fragment: int
    ) -> str | None:
        """The table of C20; an empty reason: the phase, or a group just closed, makes it nothing."""
        if member.generation not in self.watcher.live.get(member.learner_id, ()):
            return ""
        if self.driver.phase is Phase.CUTOFF:
            return None
        if self.driver.phase not in (Phase.INIT, Phase.RUN, Phase.DRAIN):
            return ""
        for round_, opened in self._open():
            if (round_.step, opened.number, round_.fragment) != (step, attempt, fragment):
                continue
            if member not in opened.members:
                return "unexpected_member"
            if base > opened.launch_base:
                return "future_base"
            lag = self.driver.config.max_base_lag
            if lag is not None and opened.launch_base - base > lag:
                return "stale"
            return "duplicate" if member in opened.answers else None
        return "out_of_round"

    @precondition(lambda self: not self.over)
    @rule(data=st.data(), step=st.integers(0, 50))
    def heartbeat(self, data: st.DataObject, step: int) -> None:
        member = self._some_group(data)
        if member is not None:
            out = self.send(e.HeartbeatReceived(member, step, self.driver.now))
            assert out == []

    @precondition(lambda self: not self.over and self._open())
    @rule()
    def a_round_goes_well(self) -> None:
        """What usually happens: everyone answers, merge and disk work."""
        self.everyone_answers(7)
        if not self.over:
            self._settle_tasks()

    # ---- results, in any order

    @precondition(lambda self: not self.over and self.driver.open_of(c.StartMerge))
    @rule(data=st.data(), refuse=st.sampled_from([False, False, False, False, True]))
    def merge_ends(self, data: st.DataObject, refuse: bool) -> None:
        task = data.draw(st.sampled_from(self.driver.open_of(c.StartMerge)))
        del self.driver.open_tasks[task.ticket]
        if refuse:
            largest = data.draw(st.sampled_from([r.member for r in task.job.responses]))
            self.send(e.MergeRefused(task.ticket, largest))
        else:
            self.send(e.MergeDone(task.ticket, fake_merge(task.job), 0.1))

    @precondition(lambda self: not self.over and self.driver.open_of(c.SaveCheckpoint))
    @rule(works=st.sampled_from([True, True, True, False]))
    def save_ends(self, works: bool) -> None:
        (save,) = self.driver.open_of(c.SaveCheckpoint)
        del self.driver.open_tasks[save.ticket]
        del self.watcher.saving[save.ticket]
        if works:
            self.watcher.durable = save.snapshot.global_step
            self.send(e.SaveDone(save.ticket))
        else:
            self.send(e.SaveFailed(save.ticket, "disk full"))

    @precondition(lambda self: not self.over and self._other_tasks())
    @rule(data=st.data())
    def task_ends(self, data: st.DataObject) -> None:
        self._end_task(data.draw(st.sampled_from(self._other_tasks())))

    def _other_tasks(self) -> list[Any]:
        return [
            task
            for task in self.driver.open_tasks.values()
            if not isinstance(task, c.StartMerge | c.SaveCheckpoint)
        ]

    def _end_task(self, task: Any) -> None:
        del self.driver.open_tasks[task.ticket]
        if isinstance(task, c.DecodeInit):
            values = tuple(vector() for _ in task.tensors)
            self.send(e.InitDecoded(task.ticket, values))
        else:
            self.send(e.TaskDone(task.ticket))

    # ---- the end

    @precondition(lambda self: self.driver.phase in (Phase.DELIVER, Phase.DONE))
    @rule(data=st.data(), queue=st.booleans(), wrong=st.sampled_from([0, 0, 0, 1]))
    def cut_and_ack(self, data: st.DataObject, queue: bool, wrong: int) -> None:
        member = self._some_group(data)
        if member is None or self.watcher.final_step is None:
            return
        cuts = {cut.member for cut in self.driver.log if isinstance(cut, c.SendCut)}
        if queue and member in cuts:
            self.watcher.queued.add(member)
            self.send(e.CutQueued(member))
        if member in self.watcher.queued and not wrong:
            self.watcher.acked.add(member)
            self.watcher.acked_ids.add(member.learner_id)
        self.send(e.FinalAckReceived(member, self.watcher.final_step + wrong))

    @precondition(lambda self: not self.over and self.budget is not None)
    @rule(data=st.data(), wrong=st.sampled_from([False] * 7 + [True]))
    def budget_report(self, data: st.DataObject, wrong: bool) -> None:
        member = self._some_group(data)
        if member is not None:
            self.send(e.BudgetDoneReceived(member, None if wrong else BUDGET))

    @precondition(lambda self: not self.over)
    @rule(really=st.sampled_from([False] * 19 + [True]))
    def signal(self, really: bool) -> None:
        if really:
            self.send(e.StopSignal())

    @precondition(lambda self: not self.over)
    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 3.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        end = self.driver.now + seconds
        while not self.over:
            deadline = self.driver.core.next_deadline()
            if deadline is None or deadline > end:
                break
            self.driver.now = deadline
            self.send(e.Tick())
        self.driver.now = end

    @precondition(lambda self: self.over)
    @rule(learner=IDS)
    def nothing_follows_the_end(self, learner: int) -> None:
        assert self.driver.join(learner, generation=999) == []
        assert self.driver.signal() == []
        assert self.driver.core.next_deadline() is None

    # ---- termination

    def teardown(self) -> None:
        """With a cooperative world every run ends: C21's retries and every deadline are finite."""
        if not hasattr(self, "driver"):
            return
        for _ in range(400):
            if self.over:
                return
            self._cooperate()
        raise AssertionError(f"the run hangs in {self.driver.phase}")

    def _cooperate(self) -> None:
        driver, watcher = self.driver, self.watcher
        for learner in range(LEARNERS):
            if learner not in watcher.current and not self.over:
                self.join(learner)
        for step in (self._settle_tasks, self._all_answer, self._all_acknowledge):
            if not self.over:
                step()
        waits = driver.phase in (Phase.INIT, Phase.CUTOFF) and driver.core._ctx.model is None
        if not self.over and waits and 0 in watcher.current:
            self.init()
        elif not self.over and driver.phase in (Phase.RUN, Phase.DRAIN):
            if driver.core._signals == 0:
                self.send(e.StopSignal())
        elif not self.over and driver.phase is Phase.CUTOFF:
            self._all_report()
        if not self.over:
            self.time_passes(0.5)

    def _settle_tasks(self) -> None:
        while self.driver.open_tasks and not self.over:
            task = next(iter(self.driver.open_tasks.values()))
            if isinstance(task, c.SaveCheckpoint):
                self.save_ends(True)
            elif isinstance(task, c.StartMerge):
                del self.driver.open_tasks[task.ticket]
                self.send(e.MergeDone(task.ticket, fake_merge(task.job), 0.1))
            else:
                self._end_task(task)

    def _all_answer(self) -> None:
        while not self.over and any(attempt.silent for _, attempt in self._open()):
            round_, attempt = next(pair for pair in self._open() if pair[1].silent)
            member = min(attempt.silent)
            self._push(member, round_.step, attempt.number, attempt.launch_base, 5)

    def _all_acknowledge(self) -> None:
        for member in [Member(i, g) for i, g in sorted(self.watcher.current.items())]:
            if self.driver.phase is not Phase.DELIVER or self.watcher.final_step is None:
                return
            self.watcher.queued.add(member)
            self.send(e.CutQueued(member))
            self.watcher.acked.add(member)
            self.watcher.acked_ids.add(member.learner_id)
            self.send(e.FinalAckReceived(member, self.watcher.final_step))

    def _all_report(self) -> None:
        budget = self.driver.core._budget
        for learner, generation in sorted(self.watcher.current.items()):
            if self.over or budget is None:
                return
            if learner not in budget._reports:
                self.send(e.BudgetDoneReceived(Member(learner, generation), BUDGET))
