"""Budget mode: the cutoff process of a benchmark (C70 to C75)."""

from __future__ import annotations

from collections import OrderedDict

from syncer.commands import DrainPool, SaveKind
from syncer.context import Context, Phase
from syncer.events import BudgetDoneReceived, Member, TaskDone
from syncer.records import event_record, member_list
from syncer.saving import SaveJob, Saver


class Budget:
    """Reports, the gate and the leases.

    A lease runs for each id that has not reported (C73), and for id 0 until its model is there,
    which the cutoff needs too (C74): else a run whose first learner reports and dies before INIT
    would wait for ever.
    """

    def __init__(self, ctx: Context, saver: Saver, steps: int) -> None:
        self._ctx = ctx
        self._saver = saver
        self._steps = steps
        self._reports: dict[int, Member] = {}
        self._closed_at = 0.0
        self._renewed: OrderedDict[int, float] = OrderedDict()
        self._cutting = False

    def report(self, event: BudgetDoneReceived, now: float) -> bool:
        """Take one report; True when it is the first and closes the gate (C71, C72, C75)."""
        learner_id = event.member.learner_id
        group = self._ctx.members.get(event.member)
        wrong = None
        if event.steps is None:
            wrong = "a budget report that is not 8 bytes"
        elif event.steps != self._steps:
            wrong = f"a budget report of {event.steps} steps instead of {self._steps}"
        elif learner_id in self._reports:
            wrong = "a second budget report"
        elif group is None or not group.current:
            wrong = "a budget report from a superseded generation"
        if wrong is not None:
            self._ctx.fail(f"learner {learner_id} sent {wrong}: the benchmark is void")
            return False
        self._reports[learner_id] = event.member
        self._renewed.pop(learner_id, None)
        self.renew(event.member, now)
        missing = self._ctx.config.learners - len(self._reports)
        self._ctx.log("info", f"learner {learner_id} finished its budget, {missing} to go")
        if len(self._reports) > 1:
            return False
        self._closed_at = now
        return True

    def renew(self, member: Member, now: float) -> None:
        """A HEARTBEAT, PUSH or HELLO renews the lease of an id that has one (C73)."""
        if self._owes(member.learner_id):
            self._renewed[member.learner_id] = now
            self._renewed.move_to_end(member.learner_id)

    def advance(self, now: float) -> None:
        """C74: after the last report, and once there is a model, write the cut and leave."""
        ctx = self._ctx
        if 0 in self._renewed and not self._owes(0):
            del self._renewed[0]
        ready = len(self._reports) == ctx.config.learners and ctx.model is not None
        if self._cutting or not ready or ctx.phase is not Phase.CUTOFF:
            return
        self._cutting = True
        ctx.ask(DrainPool, self._drained)

    def _drained(self, event: TaskDone, now: float) -> None:
        model, session = self._ctx.model, self._ctx.session
        if self._ctx.phase is not Phase.CUTOFF or model is None or session is None:
            return
        cut = model.snapshot(session, self._ctx.config.iso_backend)

        def written(at: float) -> None:
            self._written(cut.global_step)

        self._saver.submit(SaveJob(SaveKind.RECOVERY, cut, written))

    def _written(self, step: int) -> None:
        if self._ctx.phase is not Phase.CUTOFF:
            return
        members = [self._reports[learner_id] for learner_id in sorted(self._reports)]
        self._ctx.record(event_record("cutoff", checkpoint_step=step, members=member_list(members)))
        self._ctx.log("info", "learner-budget cutoff checkpoint written")
        self._ctx.finish()

    # ---- leases

    def _owes(self, learner_id: int) -> bool:
        """Whether the cutoff waits for something of this id."""
        return learner_id not in self._reports or (learner_id == 0 and self._ctx.model is None)

    def deadline(self) -> float | None:
        """When the oldest lease of an id that has not reported expires (C73)."""
        oldest = self._oldest_lease()
        return None if oldest is None else oldest + self._ctx.config.quorum_timeout

    def _oldest_lease(self) -> float | None:
        if self._ctx.phase is not Phase.CUTOFF:
            return None
        both = 0 in self._reports and 0 in self._renewed
        if len(self._reports) + len(self._renewed) - both < self._ctx.config.learners:
            return self._closed_at
        return next(iter(self._renewed.values()), None)

    def tick(self, now: float) -> None:
        """An expired lease ends the run without a checkpoint (C73, C75)."""
        due = self.deadline()
        if due is None or now < due:
            return
        missing = self._first_expired(now)
        owed = "initial model" if missing in self._reports else "budget report"
        self._ctx.fail(
            f"learner {missing} gave no sign of life and no {owed} for "
            f"{self._ctx.config.quorum_timeout:g} s: the benchmark is void"
        )

    def _first_expired(self, now: float) -> int:
        for learner_id in range(self._ctx.config.learners):
            if not self._owes(learner_id):
                continue
            since = self._renewed.get(learner_id, self._closed_at)
            if since + self._ctx.config.quorum_timeout <= now:
                return learner_id
        raise AssertionError("no lease has expired")
