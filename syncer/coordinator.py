"""The coordinator core: `handle(event, now) -> commands`, pure (coordinator.md, house.md).

This file is the table of C86: which event means what in which phase. The rules themselves live in
`startup` (C5 to C9), `scheduler` (C10 to C37), `finalization` (C60 to C67), `budget` (C70 to C75),
`saving` (C35) and `ending` (C80 to C83); all of them share one `Context`. No socket, file, thread
or clock is touched.

Phases (C3): INIT -> RUN -> DRAIN -> FREEZE -> DELIVER -> DONE; budget mode: INIT, RUN -> CUTOFF.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncer import ending
from syncer.budget import Budget
from syncer.commands import (
    AcceptHello,
    Command,
    RefuseHello,
    SendBroadcast,
)
from syncer.config import CoordinatorConfig
from syncer.context import FINALIZING, Context, Phase
from syncer.events import (
    BudgetDoneReceived,
    CutQueued,
    Event,
    Failure,
    FinalAckReceived,
    GroupClosed,
    HeartbeatReceived,
    HelloReceived,
    InitDecoded,
    InitReceived,
    Member,
    MergeDone,
    MergeRefused,
    PushReceived,
    SaveDone,
    SaveFailed,
    StopSignal,
    TaskDone,
    Tick,
)
from syncer.finalization import Finalization
from syncer.membership import Group, Membership
from syncer.records import event_record
from syncer.saving import Saver
from syncer.scheduler import Scheduler
from syncer.session import ResumeSource, SessionFacts, admit
from syncer.startup import Startup
from wire.errors import ErrorCode, ProtocolError
from wire.replay import ReplayGuard

_MEASURING = frozenset({Phase.INIT, Phase.RUN, Phase.DRAIN})
_COMMITTING = frozenset({Phase.RUN, Phase.DRAIN})


class Coordinator:
    """The scheduler of one run.

    Args:
        config: the options that concern it.
        resumed: the checkpoint to go on from, None for a fresh run.
        replays: where strangers cannot enter, refuses a generation that was accepted before (S4);
            without it one that is gone may come back.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        resumed: ResumeSource | None = None,
        replays: ReplayGuard | None = None,
    ) -> None:
        self._config = config
        self._replays = replays
        self._ctx = Context(config)
        self._saver = Saver(self._ctx)
        self._resumed = resumed
        self._gate = None if resumed is None else resumed.gate
        self._startup = Startup(self._ctx, self._saver, resumed)
        self._scheduler: Scheduler | None = None
        self._finalization = Finalization(self._ctx, self._saver)
        self._budget: Budget | None = None
        if config.budget_steps is not None:
            self._budget = Budget(self._ctx, self._saver, config.budget_steps)
        self._signals = 0
        self._stop_by: float | None = None
        self._lingering: list[Group] = []
        self._due: float | None = None
        self._handlers: dict[type[Any], Callable[[Any, float], bool]] = {
            HelloReceived: self._on_hello,
            GroupClosed: self._on_closed,
            InitReceived: self._on_init,
            PushReceived: self._on_push,
            HeartbeatReceived: self._on_heartbeat,
            FinalAckReceived: self._on_ack,
            BudgetDoneReceived: self._on_budget,
            CutQueued: self._on_queued,
            Failure: self._on_failure,
            StopSignal: self._on_signal,
            Tick: self._on_tick,
            InitDecoded: self._on_answer,
            MergeDone: self._on_answer,
            MergeRefused: self._on_answer,
            SaveDone: self._on_answer,
            SaveFailed: self._on_answer,
            TaskDone: self._on_answer,
        }

    # ---- what the actor sees

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event and say what to do.

        Args:
            event: anything of `syncer.events`.
            now: monotonic seconds, never less than in an earlier call.

        Returns:
            Commands in the order in which they are to run; none after a `Finish`.
        """
        if self.finished:
            return []
        # What ended before this message arrived ended without it, however late we hear (C2).
        if isinstance(event, PushReceived | HeartbeatReceived):
            self._pass_time(min(event.arrived, now), inclusive=False)
        if self._handlers[type(event)](event, now):
            self._advance(now)
            self._due = self._next()
        self._pass_time(now, inclusive=True)
        return self._ctx.take_commands()

    def next_deadline(self) -> float | None:
        """When a `Tick` is wanted, None when only events matter."""
        return None if self.finished else self._due

    @property
    def phase(self) -> Phase:
        """Where the run stands."""
        return self._ctx.phase

    @property
    def finished(self) -> bool:
        """`Finish` was returned."""
        return self._ctx.phase is Phase.FINISHED

    @property
    def session(self) -> SessionFacts | None:
        """What all HELLOs share, None before the first accepted one."""
        return self._ctx.session

    @property
    def global_step(self) -> int:
        """t_g, 0 before the model is there."""
        return 0 if self._ctx.model is None else self._ctx.model.global_step

    @property
    def members(self) -> Membership:
        """Who is connected; for reading only."""
        return self._ctx.members

    @property
    def dropped(self) -> dict[str, int]:
        """Messages dropped because they came at the wrong time, by kind."""
        return dict(self._ctx.dropped)

    # ---- time

    def _pass_time(self, now: float, *, inclusive: bool) -> None:
        due = self._due
        if due is None or now < due or (now == due and not inclusive):
            return
        self._tick(now)
        self._advance(now)
        self._due = self._next()

    def _tick(self, now: float) -> None:
        """Everything whose time has come."""
        self._saver.tick(now)
        self._startup.tick(now)
        if self._scheduler is not None and self._ctx.phase in _COMMITTING:
            self._scheduler.tick(now)
        if self._stop_by is not None and self._ctx.phase is Phase.DRAIN and now >= self._stop_by:
            self._discard_open("stop", now)
        if self._budget is not None:
            self._budget.tick(now)
        self._finalization.tick(now)
        if self._ctx.phase not in FINALIZING:
            timeout = self._config.stall_timeout
            self._lingering += self._ctx.members.take_superseded(timeout, now)

    def _next(self) -> float | None:
        times = [self._saver.deadline, self._startup.deadline(), self._finalization.deadline()]
        if self._scheduler is not None and self._ctx.phase in _COMMITTING:
            times.append(self._scheduler.deadline())
        if self._ctx.phase is Phase.DRAIN:
            times.append(self._stop_by)
        if self._budget is not None:
            times.append(self._budget.deadline())
        if self._ctx.phase not in FINALIZING:
            since = self._ctx.members.oldest_superseded()
            times.append(None if since is None else since + self._config.stall_timeout)
        return min((time for time in times if time is not None), default=None)

    def _advance(self, now: float) -> None:
        """Follow up: barrier, rounds, freeze, cutoff."""
        if self._lingering:
            self._close_superseded(now)
        if self._ctx.phase is Phase.INIT and self._startup.barrier_met():
            self._begin(now)
        if self._scheduler is not None and self._ctx.phase in _COMMITTING:
            self._scheduler.advance(now)
            if self._ctx.phase is Phase.DRAIN and self._scheduler.idle:
                self._drained(now)
        if self._budget is not None:
            self._budget.advance(now)

    def _begin(self, now: float) -> None:
        """The barrier has fallen (C8, C9)."""
        ctx = self._ctx
        model, session = ctx.model, ctx.session
        if model is None or session is None:
            raise AssertionError("the barrier fell without a model")
        self._resumed = None  # its tensors are the model's now, and go with its updates
        if model.global_step == self._config.total_steps:
            self._finalization.freeze(now)
            return
        ctx.phase = Phase.RUN
        self._scheduler = Scheduler(ctx, self._saver, model, session)
        ctx.log("info", f"{len(ctx.members.ids)} learners are here: round {model.global_step + 1}")
        if self._gate is None:
            ctx.record(
                event_record(
                    "start",
                    profile=self._config.profile.hex(),
                    layout_hash=session.fingerprint.hex(),
                    learners=self._config.learners,
                    quorum=self._config.quorum,
                )
            )

    def _drained(self, now: float) -> None:
        """No round is open any more: freeze; a budget run should never come here (C75)."""
        if self._budget is None:
            self._finalization.freeze(now)
            return
        text = f"all {self.global_step} outer steps are done and no learner reported its budget"
        ending.end(self._ctx, self._saver, text, drain=True)

    # ---- groups

    def _on_hello(self, event: HelloReceived, now: float) -> bool:
        hello, ctx = event.hello, self._ctx
        member = Member(hello.learner_id, hello.generation)
        try:
            admit(hello, self._config, ctx.session, self._gate)
            snapshot = None
            if self._resumed is not None and ctx.model is None:
                snapshot = self._resumed.snapshot_for(hello)
            if ctx.members.holds(member):
                raise ProtocolError(  # step 14 of W12
                    ErrorCode.DUPLICATE_GENERATION,
                    f"learner {member.learner_id} is already connected with this generation",
                )
            if self._replays is not None:
                self._replays.check(*member)
        except ProtocolError as error:
            ctx.emit(RefuseHello(event.token, error))
            ctx.log("warning", f"refused learner {member.learner_id}: {error.text}")
            return False
        if self._replays is not None:
            self._replays.remember(*member)
        if ctx.session is None:
            ctx.session = SessionFacts.of(hello)
            ctx.log(
                "info",
                f"learner {member.learner_id} fixed the session: {hello.dtype.label}, "
                f"{len(hello.layout)} fragments, {sum(ctx.session.numels)} elements, "
                f"layout {hello.fingerprint.hex()[:16]}",
            )
        group = ctx.members.register(member, now)
        ctx.emit(AcceptHello(event.token, member))
        ctx.log("info", f"learner {member.learner_id} joined, {len(ctx.members.ids)} connected")
        if ctx.phase is Phase.CUTOFF and self._budget is not None:
            self._budget.renew(member, now)
        was_published = self._startup.published
        self._startup.registered(group, snapshot, now)
        self._finalization.registered(group)
        if was_published and ctx.phase in _MEASURING:
            self._catch_up(member)
        return True

    def _catch_up(self, member: Member) -> None:
        """Every fragment at its current version at once, while there are steps to do (C37)."""
        model, total = self._ctx.model, self._config.total_steps
        if model is None or (total is not None and model.global_step >= total):
            return
        for fragment, state in enumerate(model.fragments):
            visible = state if self._scheduler is None else self._scheduler.visible(fragment)
            self._ctx.emit(SendBroadcast((member,), fragment, visible.version, visible.params))

    def _on_closed(self, event: GroupClosed, now: float) -> bool:
        if self._ctx.members.gone(event.member):
            return False
        group = self._ctx.members.remove(event.member)
        if group is None:
            return False
        ids = len(self._ctx.members.ids)
        self._ctx.log("info", f"learner {event.member.learner_id} left, {ids} connected")
        self._after_loss(group, now)
        return True

    def _after_loss(self, group: Group, now: float) -> None:
        self._startup.group_gone(group)
        if self._scheduler is not None:
            self._scheduler.group_gone(group.member, now)

    def _close(self, group: Group, error: ProtocolError, now: float) -> None:
        if self._ctx.close(group.member, error):
            self._after_loss(group, now)

    def _close_superseded(self, now: float) -> None:
        """C19: the stall timeout has passed, and no open attempt captured it."""
        waiting, self._lingering = self._lingering, []
        for group in waiting:
            if self._ctx.members.get(group.member) is not group:
                continue
            if self._scheduler is not None and self._scheduler.gathers(group.member):
                self._lingering.append(group)
            elif self._ctx.phase not in FINALIZING:
                text = f"a newer connection of learner {group.member.learner_id} took its place"
                self._close(group, ProtocolError(ErrorCode.SUPERSEDED, text), now)

    # ---- messages

    def _on_init(self, event: InitReceived, now: float) -> bool:
        self._startup.init(event, now)
        return True

    def _on_push(self, event: PushReceived, now: float) -> bool:
        phase = self._ctx.phase
        group = self._ctx.members.get(event.member)
        if group is None:
            return False
        if phase in _MEASURING:
            group.estimate.observe(event.arrived, event.push.local_step)
            if self._scheduler is not None:
                return self._scheduler.push(event, now)
            self._ctx.reject("out_of_round")
            return False
        return self._renew(event.member, now)

    def _on_heartbeat(self, event: HeartbeatReceived, now: float) -> bool:
        group = self._ctx.members.get(event.member)
        if group is None:
            return False
        if self._ctx.phase in _MEASURING:
            group.estimate.observe(event.arrived, event.local_step)
            return False
        return self._renew(event.member, now)

    def _renew(self, member: Member, now: float) -> bool:
        if self._budget is None or self._ctx.phase is not Phase.CUTOFF:
            return False
        self._budget.renew(member, now)
        return True

    def _on_ack(self, event: FinalAckReceived, now: float) -> bool:
        self._finalization.acknowledged(event, now)
        return True

    def _on_queued(self, event: CutQueued, now: float) -> bool:
        self._finalization.queued(event)
        return False

    def _on_budget(self, event: BudgetDoneReceived, now: float) -> bool:
        """C71, C72; a fault with budget mode off."""
        if self._budget is None:
            group = self._ctx.members.get(event.member)
            if group is not None:
                text = "BUDGET_DONE, and this syncer runs without --learner-budget-steps"
                self._close(group, ProtocolError(ErrorCode.BUDGET_OFF, text), now)
            return True
        if self._ctx.phase is Phase.ENDING or self._ctx.members.get(event.member) is None:
            return False
        if self._budget.report(event, now):
            self._discard_open("cutoff", now)
            self._ctx.phase = Phase.CUTOFF
        return True

    def _on_answer(self, event: Any, now: float) -> bool:
        self._ctx.answered(event, now)
        return True

    def _on_failure(self, event: Failure, now: float) -> bool:
        self._ctx.fail(event.reason)
        return True

    def _on_tick(self, event: Tick, now: float) -> bool:
        return False

    # ---- signals and ends

    def _on_signal(self, event: StopSignal, now: float) -> bool:
        """C80 to C83."""
        self._signals += 1
        ctx, phase = self._ctx, self._ctx.phase
        if phase is Phase.ENDING:
            return False
        if self._budget is not None:
            self._discard_open("stop", now)
            ending.stop_budget(ctx, self._saver)
        elif phase is Phase.INIT:
            ending.stop_before_start(ctx)
        elif self._signals > 1:
            self._discard_open("stop", now)
            ending.stop_now(ctx, self._saver)
        elif self._scheduler is not None and phase in _COMMITTING:
            self._scheduler.stopping = True
            self._stop_by = ending.drain(ctx, now)
        else:
            ctx.log("info", "the run is being finalized already; a second signal ends it")
        return True

    def _discard_open(self, reason: str, now: float) -> None:
        if self._scheduler is not None and self._ctx.phase in _COMMITTING:
            self._scheduler.settle(reason, now)
