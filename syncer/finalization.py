"""The final cut: frozen ids, delivery, acknowledgements, marker (C60 to C67)."""

from __future__ import annotations

from checkpoint.snapshot import Snapshot
from syncer.commands import (
    DrainPool,
    SaveKind,
    SendCut,
    SendShutdown,
    WriteFinalState,
    WriteMarker,
)
from syncer.context import Context, Phase
from syncer.events import CutQueued, FinalAckReceived, Member, TaskDone
from syncer.membership import Group
from syncer.records import event_record, member_list
from syncer.saving import SaveJob, Saver
from wire.errors import ErrorCode, ProtocolError

FLUSH_SECONDS = 2.0
"""Longest flush of the SHUTDOWNs (DONE)."""


class Finalization:
    """FREEZE, DELIVER and DONE."""

    def __init__(self, ctx: Context, saver: Saver) -> None:
        self._ctx = ctx
        self._saver = saver
        self._frozen: tuple[Member, ...] = ()
        self._pending: set[int] = set()
        self._cut: Snapshot | None = None
        self._deadline = 0.0

    def freeze(self, now: float) -> None:
        """FREEZE: the set, the deadline, then pool, checkpoint and final-state in order."""
        ctx = self._ctx
        model, session = ctx.model, ctx.session
        if model is None or session is None:
            raise AssertionError("nothing to freeze before the model is there")
        ctx.phase = Phase.FREEZE
        self._frozen = ctx.members.current()
        self._pending = {member.learner_id for member in self._frozen}
        self._deadline = now + ctx.config.final_ack_timeout
        cut = self._cut = model.snapshot(session, ctx.config.iso_backend)
        ctx.log(
            "info",
            f"frozen at step {cut.global_step} with {len(self._frozen)} learners: "
            "writing the final checkpoint",
        )

        def drained(event: TaskDone, at: float) -> None:
            if ctx.phase is Phase.FREEZE:
                self._saver.submit(SaveJob(SaveKind.TERMINAL, cut, self._saved))

        ctx.ask(DrainPool, drained)

    def _saved(self, now: float) -> None:
        cut = self._cut
        if self._ctx.phase is not Phase.FREEZE or cut is None:
            return
        self._ctx.record(
            event_record(
                "finalize", checkpoint_step=cut.global_step, members=member_list(self._frozen)
            )
        )
        if self._ctx.config.final_state:
            self._ctx.ask(lambda ticket: WriteFinalState(ticket, cut), self._state_written)
        else:
            self._deliver(now)

    def _state_written(self, event: TaskDone, now: float) -> None:
        if self._ctx.phase is Phase.FREEZE:
            self._deliver(now)

    def _deliver(self, now: float) -> None:
        """C60: the cut to every current group, of frozen ids and, as a courtesy, of others."""
        ctx = self._ctx
        if not self._frozen:
            self._nobody()
            return
        ctx.phase = Phase.DELIVER
        if now >= self._deadline:
            self._timed_out()
            return
        for member in ctx.members.current():
            self._send_cut(member)

    def _nobody(self) -> None:
        """C62: the files are written, nobody can acknowledge them."""
        text = "no learner is connected: the final checkpoint is written but unmarked"
        self._ctx.log("warning", text)
        if self._ctx.config.mark_final:
            self._ctx.finish(f"{text}, nobody acknowledged it")
        else:
            self._log_complete()
            self._ctx.finish()

    def registered(self, group: Group) -> None:
        """A generation that connects now gets the full cut (C60); never in the frozen set."""
        if self._ctx.phase in (Phase.DELIVER, Phase.DONE):
            self._send_cut(group.member)

    def _send_cut(self, member: Member) -> None:
        cut = self._cut
        if cut is None:
            raise AssertionError("no cut to deliver")
        versions = tuple(state.version for state in cut.fragments)
        params = tuple(state.params for state in cut.fragments)
        self._ctx.emit(SendCut(member, cut.global_step, versions, params))

    def queued(self, event: CutQueued) -> None:
        """All of the cut is queued on an open group: it may acknowledge (C60)."""
        group = self._ctx.members.get(event.member)
        if group is not None and self._ctx.phase in (Phase.DELIVER, Phase.DONE):
            group.eligible = True

    def acknowledged(self, event: FinalAckReceived, now: float) -> None:
        """C63, in its order."""
        group = self._ctx.members.get(event.member)
        cut = self._cut
        if group is None or cut is None or not group.eligible or event.step != cut.global_step:
            self._ctx.drop("final_ack")
            return
        group.acked = True
        self._pending.discard(event.member.learner_id)
        if not self._pending and self._ctx.phase is Phase.DELIVER:
            self._done(now)

    def _done(self, now: float) -> None:
        """DONE: the marker where C66 allows it, before the first SHUTDOWN."""
        ctx = self._ctx
        ctx.phase = Phase.DONE
        ctx.log("info", "all learners acknowledged final cut")
        step = self._step
        if ctx.config.mark_final and ctx.config.total_steps in (None, step):
            ctx.ask(lambda ticket: WriteMarker(ticket, step), self._marked)
        else:
            self._shut_down()

    def _marked(self, event: TaskDone, now: float) -> None:
        if self._ctx.phase is Phase.DONE:
            self._shut_down()

    def _shut_down(self) -> None:
        """C64: only a generation whose own ACK was accepted."""
        for group in sorted(self._ctx.members.groups(), key=lambda group: group.member):
            if group.acked:
                self._ctx.emit(SendShutdown(group.member))
        self._log_complete()
        self._ctx.finish(flush=FLUSH_SECONDS)

    def _log_complete(self) -> None:
        """C85; a run stopped before T did not complete."""
        total = self._ctx.config.total_steps
        if total in (None, self._step):
            self._ctx.log("info", f"training complete after {self._step} outer steps")
        else:
            self._ctx.log("info", f"training stopped after {self._step} of {total} outer steps")

    @property
    def _step(self) -> int:
        if self._cut is None:
            raise AssertionError("no final step before the freeze")
        return self._cut.global_step

    # ---- time

    def deadline(self) -> float | None:
        """C65. In FREEZE a write in progress is let to its end first: it is recovery state."""
        return self._deadline if self._waits else None

    @property
    def _waits(self) -> bool:
        phase = self._ctx.phase
        failing = phase is Phase.FREEZE and self._saver.failing and bool(self._frozen)
        return phase is Phase.DELIVER or failing

    def tick(self, now: float) -> None:
        """C65: the deadline is absolute."""
        if self._waits and now >= self._deadline:
            self._timed_out()

    def _timed_out(self) -> None:
        missing = ", ".join(map(str, sorted(self._pending)))
        text = (
            f"learners {missing} did not acknowledge the final cut of step {self._step} within "
            f"{self._ctx.config.final_ack_timeout:g} s"
        )
        self._ctx.finish(text, ProtocolError(ErrorCode.FINAL_TIMEOUT, text))
