"""Rounds from launch to commit: gathering in any order, commits strictly in t order (C10 to C37).

WAITING -> GATHERING -> COMPUTING -> MERGED -> (COMMITTING) -> gone
   ^___________|____________|          a failed attempt waits for the next one (C21, C22)
"""

from __future__ import annotations

import math

from checkpoint.snapshot import FragmentState, Snapshot
from syncer.commands import (
    DropPulls,
    SaveKind,
    SendBroadcast,
    SendPull,
    StartMerge,
)
from syncer.context import Context, Phase
from syncer.events import Member, MergeDone, MergeRefused, PushReceived
from syncer.merge.weights import learner_weight
from syncer.pacing import Ema, grace_seconds, launch_interval
from syncer.records import commit_record, discard_record
from syncer.rounds import Answer, Attempt, Round, Status, merge_job
from syncer.saving import SaveJob, Saver
from syncer.session import SessionFacts
from syncer.state import Model
from wire.errors import ErrorCode, ProtocolError

REJOIN_WINDOW = 1.5
"""Seconds that an attempt waits for learners that only blinked: less than the 2 s of C22b, so that
the commit, too, is there within 2 s of a learner's death."""
REFUSED_PAUSE = 0.1
"""Least seconds before a round that could not be merged is tried again (C22c, d)."""
OVERFLOW_LIMIT = 3
"""Different ids closed for one round that make it the state's fault, not a client's (C34)."""


class Scheduler:
    """All open rounds and the order of commits; created when the model and session are known."""

    def __init__(self, ctx: Context, saver: Saver, model: Model, session: SessionFacts) -> None:
        self._ctx = ctx
        self._config = ctx.config
        self._saver = saver
        self._model = model
        self._session = session
        self._fragments = len(session.layout)
        self._depth = min(ctx.config.pipeline, self._fragments)
        self._rounds: dict[int, Round] = {}
        self._waiting: dict[int, Round] = {}
        self._next_step = model.global_step + 1
        self._floor = -math.inf
        self._quorum_latency = Ema()
        self._sync_latency = Ema()
        self._committing: Round | None = None
        self._replaced: FragmentState | None = None
        self._commit_started = 0.0
        self.stopping = False
        """A stop was requested: the highest round launched is the last (C32, C80)."""

    @property
    def idle(self) -> bool:
        """No round is open."""
        return not self._rounds

    @property
    def last_step(self) -> int | None:
        """The terminal round: T, or after a stop request the highest launched (C32)."""
        return self._next_step - 1 if self.stopping else self._config.total_steps

    def visible(self, fragment: int) -> FragmentState:
        """What may be broadcast: with `--checkpoint-every 1` only what is durable (C32)."""
        committing = self._committing
        if committing is not None and committing.fragment == fragment and self._replaced:
            return self._replaced
        return self._model.fragments[fragment]

    def gathers(self, member: Member) -> bool:
        """Whether an attempt that captured this generation still gathers (C19)."""
        return any(
            member in round_.attempt.captured
            for round_ in self._rounds.values()
            if round_.status is Status.GATHERING and round_.attempt is not None
        )

    # ---- what arrives

    def push(self, event: PushReceived, now: float) -> bool:
        """Admit a PUSH or count why not (C20). True when more than a count or a set changed."""
        push = event.push
        round_ = self._rounds.get(push.step)
        attempt = round_.attempt if round_ and round_.status is Status.GATHERING else None
        if (
            round_ is None
            or attempt is None
            or round_.fragment != push.fragment
            or attempt.number != push.attempt
        ):
            self._ctx.reject("out_of_round")
            return False
        reason = attempt.refusal(event.member, push.base_version, self._config.max_base_lag)
        if reason is not None:
            self._ctx.reject(reason)
            return False
        attempt.accept(
            event.member, Answer(push.base_version, push.c_steps, push.c_tokens, push.tensor)
        )
        reached = len(attempt.answers) == attempt.quorum
        if reached:
            self._quorum_reached(attempt, event.arrived)
        if attempt.has_quorum and (not attempt.silent or attempt.grace == 0):
            self._gathered(round_, attempt, now)
            return True
        return reached

    def _quorum_reached(self, attempt: Attempt, arrived: float) -> None:
        """C15, C16, C17: the K_round-th answer is there."""
        attempt.quorum_seconds = max(0.0, arrived - attempt.started)
        self._quorum_latency.add(attempt.quorum_seconds)
        if len(attempt.answers) == len(attempt.members):
            return
        attempt.grace = grace_seconds(
            self._config,
            self._ctx.members.step_seconds(attempt.members),
            self._quorum_latency.value or 0.0,
            self._sync_latency.value or 0.0,
        )
        attempt.grace_end = arrived + attempt.grace

    def group_gone(self, member: Member, now: float) -> None:
        """The alive set shrinks: complete or unreachable (C17, C18, C21b)."""
        for round_ in list(self._rounds.values()):
            attempt = round_.attempt
            if round_.status is not Status.GATHERING or attempt is None:
                continue
            if member not in attempt.silent:
                continue
            attempt.silent.discard(member)
            if attempt.unreachable:
                self._attempt_failed(round_, "quorum_unreachable", now)
            elif attempt.has_quorum and not attempt.silent:
                self._gathered(round_, attempt, now)

    # ---- time

    def tick(self, now: float) -> None:
        """Deadlines and grace windows of gathering attempts (C17, C21a)."""
        for round_ in list(self._rounds.values()):
            attempt = round_.attempt
            if round_.status is not Status.GATHERING or attempt is None:
                continue
            if attempt.timer is None or now < attempt.timer:
                continue
            if attempt.has_quorum:
                self._gathered(round_, attempt, now)
            else:
                self._attempt_failed(round_, "quorum_timeout", now)

    def deadline(self) -> float | None:
        """When the next attempt, grace window, retry or launch is due."""
        times = [
            round_.attempt.timer
            for round_ in self._rounds.values()
            if round_.status is Status.GATHERING and round_.attempt is not None
        ]
        if self._ctx.members.ids:
            times += [round_.retry_at for round_ in self._waiting.values()]
            if self._may_launch():
                times.append(self._floor)
        return min((time for time in times if time is not None), default=None)

    def advance(self, now: float) -> None:
        """Start what may start: new attempts, the next commits, new rounds."""
        if self._waiting:
            for round_ in list(self._waiting.values()):
                if round_.may_retry(len(self._ctx.members.ids), now):
                    self._start_attempt(round_, now)
        self._commit_ready(now)
        while self._may_launch() and now >= self._floor and self._ctx.members.ids:
            self._launch(now)

    # ---- attempts

    def _may_launch(self) -> bool:
        return self._ctx.phase is Phase.RUN and len(self._rounds) < self._depth

    def _launch(self, now: float) -> None:
        """C11 to C13; with T launched the run drains."""
        step = self._next_step
        self._next_step += 1
        round_ = Round(step, (step - 1) % self._fragments)
        self._rounds[step] = round_
        members = self._start_attempt(round_, now)
        pace = self._ctx.members.step_seconds(members)
        self._floor = now + launch_interval(self._config, pace, self._fragments)
        if step == self._config.total_steps:
            self._ctx.phase = Phase.DRAIN

    def _start_attempt(self, round_: Round, now: float) -> tuple[Member, ...]:
        """C12, C21: capture afresh and ask everyone."""
        members = self._ctx.members.current()
        captured = self._ctx.members.current_set()
        round_.attempts += 1
        round_.attempt = Attempt(
            number=round_.attempts,
            members=members,
            captured=captured,
            quorum=min(self._config.quorum, len(members)),
            launch_base=self._model.fragments[round_.fragment].version,
            started=now,
            deadline=now + self._config.quorum_timeout,
            silent=set(captured),
        )
        round_.status = Status.GATHERING
        self._waiting.pop(round_.step, None)
        self._ctx.emit(SendPull(members, round_.fragment, round_.step, round_.attempts))
        return members

    def _attempt_failed(self, round_: Round, reason: str, now: float) -> None:
        """C21: discard every answer; C22: when the next attempt starts."""
        attempt = round_.attempt
        self._discard(round_, reason)
        round_.status = Status.WAITING
        round_.retry_members = None
        if reason == "quorum_timeout":
            round_.retry_at = now
        elif reason == "quorum_unreachable":
            round_.retry_at = now + REJOIN_WINDOW
            round_.retry_members = None if attempt is None else attempt.quorum
        else:
            round_.retry_at = max(self._floor, now + REFUSED_PAUSE)
        self._waiting[round_.step] = round_

    def _discard(self, round_: Round, reason: str) -> None:
        attempt = round_.attempt
        if attempt is not None and round_.status is Status.GATHERING:
            self._drop_pulls(round_, attempt)
        self._ctx.forget(round_.ticket)
        self._ctx.record(discard_record(round_, attempt, reason, self._ctx.take_rejected()))
        self._ctx.log(
            "warning",
            f"round {round_.step} (fragment {round_.fragment}): attempt "
            f"{attempt.number if attempt else round_.attempts + 1} discarded, {reason}"
            + (f", {len(attempt.answers)} of {attempt.quorum} answers" if attempt else ""),
        )
        round_.attempt = None
        round_.ticket = None
        round_.result = None

    def _drop_pulls(self, round_: Round, attempt: Attempt) -> None:
        """W45: a closed attempt takes back what nobody has begun to send."""
        if attempt.silent:
            silent = tuple(sorted(attempt.silent))
            self._ctx.emit(DropPulls(silent, round_.step, attempt.number))

    # ---- merge

    def _gathered(self, round_: Round, attempt: Attempt, now: float) -> None:
        """The round is complete: merge it off the loop (C30), unless nothing weighs (C33)."""
        self._drop_pulls(round_, attempt)
        round_.status = Status.COMPUTING
        equal = self._config.equal_weights
        weights = (
            learner_weight(answer.c_tokens, answer.c_steps, equal)
            for answer in attempt.answers.values()
        )
        if not any(weight > 0 for weight in weights):
            self._attempt_failed(round_, "zero_weight", now)
            return
        state = self._model.fragments[round_.fragment]
        job = merge_job(self._config, self._session, round_, attempt, state)
        attempt.release_payloads()

        def answered(event: MergeDone | MergeRefused, at: float) -> None:
            self._merged(round_, event, at)

        round_.ticket = self._ctx.ask(lambda ticket: StartMerge(ticket, job), answered)

    def _merged(self, round_: Round, event: MergeDone | MergeRefused, now: float) -> None:
        round_.ticket = None
        if isinstance(event, MergeRefused):
            self._overflowed(round_, event.largest, now)
            return
        round_.result = event.result
        round_.merge_seconds = event.seconds
        round_.status = Status.MERGED

    def _overflowed(self, round_: Round, largest: Member, now: float) -> None:
        """C34: the learner with the largest gradient goes; three of them and it is the state."""
        self._attempt_failed(round_, "non_finite", now)
        round_.overflowed.add(largest.learner_id)
        sentence = (
            f"round {round_.step} of fragment {round_.fragment} is not finite, "
            "and this learner's gradient is the largest"
        )
        if self._ctx.close(largest, ProtocolError(ErrorCode.OVERFLOW, sentence)):
            self.group_gone(largest, now)
        if len(round_.overflowed) >= OVERFLOW_LIMIT:
            ids = ", ".join(map(str, sorted(round_.overflowed)))
            self._ctx.fail(
                f"round {round_.step} of fragment {round_.fragment} stays not finite without "
                f"learners {ids}: the state cannot take another step; "
                "the checkpoint at the path is intact"
            )

    # ---- commit

    def _commit_ready(self, now: float) -> None:
        """C31: strictly in t order; C35: not while the disk refuses."""
        while self._committing is None and not self._saver.failing:
            round_ = self._rounds.get(self._model.global_step + 1)
            if round_ is None or round_.status is not Status.MERGED:
                return
            self._commit(round_, now)

    def _commit(self, round_: Round, now: float) -> None:
        """C32: state, then durability with every = 1, then the world."""
        attempt, result = round_.attempt, round_.result
        if attempt is None or result is None:
            raise AssertionError(f"round {round_.step} is merged without a result")
        replaced = self._model.fragments[round_.fragment]
        if replaced.version != attempt.launch_base:
            self._ctx.fail(
                f"internal error: fragment {round_.fragment} is at version {replaced.version}, "
                f"round {round_.step} was launched on {attempt.launch_base}"
            )
            return
        responders = [
            (member.learner_id, answer.c_steps, answer.c_tokens)
            for member, answer in attempt.answers.items()
        ]
        self._model.apply(round_.step, round_.fragment, result, responders)
        round_.status = Status.COMMITTING
        self._committing, self._replaced, self._commit_started = round_, replaced, now
        if self._config.checkpoint_every != 1:
            self._publish(now)
            return

        def durable(at: float) -> None:
            if self._committing is round_:
                self._publish(at)

        self._saver.submit(SaveJob(SaveKind.PERIODIC, self._snapshot(), durable))

    def _publish(self, now: float, *, broadcast: bool = True) -> None:
        """The rest of C32: broadcast unless terminal, tape, background checkpoint."""
        round_ = self._committing
        if round_ is None or round_.attempt is None or round_.result is None:
            raise AssertionError("no commit to publish")
        self._committing = self._replaced = None
        del self._rounds[round_.step]
        state = self._model.fragments[round_.fragment]
        members = self._ctx.members.current()
        if broadcast and members and round_.step != self.last_step:
            self._ctx.emit(SendBroadcast(members, round_.fragment, state.version, state.params))
        sync = round_.merge_seconds + (now - self._commit_started)
        self._sync_latency.add(sync)
        self._ctx.record(
            commit_record(
                round_,
                round_.attempt,
                round_.result,
                layout_hash=self._session.fingerprint.hex(),
                rejected=self._ctx.take_rejected(),
                total_seconds=now - round_.attempt.started,
                sync_seconds=sync,
            )
        )
        every = self._config.checkpoint_every
        if every > 1 and round_.step % every == 0 and broadcast:
            self._saver.submit(SaveJob(SaveKind.PERIODIC, self._snapshot()))

    def _snapshot(self) -> Snapshot:
        return self._model.snapshot(self._session, self._config.iso_backend)

    # ---- the end

    def settle(self, reason: str, now: float) -> None:
        """No commit any more (C72, C80, C81): discard the open rounds, each as a whole.

        A round whose commit only waits for its checkpoint has changed the state already: it is
        recorded, not broadcast, and the checkpoint that follows covers it.
        """
        if self._committing is not None:
            self._publish(now, broadcast=False)
        for round_ in self._rounds.values():
            self._discard(round_, reason)
        self._rounds.clear()
        self._waiting.clear()
