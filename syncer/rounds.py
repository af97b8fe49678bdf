"""One round and one attempt to gather it: capture, admission, completion (C10 to C23)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from checkpoint.snapshot import FragmentState
from syncer.config import CoordinatorConfig
from syncer.events import Member
from syncer.merge.plan import MergeJob, MergeResult, MergeSettings, Response
from syncer.session import SessionFacts
from wire.messages import Buffer


@dataclass(slots=True)
class Answer:
    """What the tape wants to know of one accepted PUSH; the payload goes once it is merged."""

    base_version: int
    c_steps: int
    c_tokens: int
    payload: Buffer | None


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to hear `quorum` of the captured members. Times are on the core's clock, seconds.

    Attributes:
        number: round_attempt, from 1.
        members: captured (id, generation), sorted; never changes (C12).
        quorum: K_round.
        launch_base: version of the fragment at capture.
        silent: captured groups that are alive and have not answered (C18).
        answers: accepted answers by member.
        quorum_seconds: attempt start to the K_round-th answer.
        grace: granted grace, None when none was opened.
        grace_end: when an open grace window ends.
    """

    number: int
    members: tuple[Member, ...]
    captured: frozenset[Member]
    quorum: int
    launch_base: int
    started: float
    deadline: float
    silent: set[Member]
    answers: dict[Member, Answer] = field(default_factory=dict)
    quorum_seconds: float = 0.0
    grace: float | None = None
    grace_end: float | None = None

    def refusal(self, member: Member, base_version: int, max_lag: int | None) -> str | None:
        """Rows 2 to 5 of C20; None for a PUSH to accept."""
        if member not in self.captured:
            return "unexpected_member"
        if base_version > self.launch_base:
            return "future_base"
        if max_lag is not None and self.launch_base - base_version > max_lag:
            return "stale"
        if member in self.answers:
            return "duplicate"
        return None

    def accept(self, member: Member, answer: Answer) -> None:
        """The first valid PUSH of a member (C20 row 6)."""
        self.answers[member] = answer
        self.silent.discard(member)

    @property
    def has_quorum(self) -> bool:
        """At least K_round answers are there."""
        return len(self.answers) >= self.quorum

    @property
    def unreachable(self) -> bool:
        """Answers and silent living members together are fewer than K_round (C21b)."""
        return len(self.answers) + len(self.silent) < self.quorum

    @property
    def timer(self) -> float | None:
        """When time alone ends the gathering."""
        return self.grace_end if self.has_quorum else self.deadline

    def responses(self) -> tuple[Response, ...]:
        """Accepted answers in the order of N2."""
        return tuple(
            Response(member, answer.payload, answer.c_tokens, answer.c_steps)
            for member in self.members
            if (answer := self.answers.get(member)) is not None and answer.payload is not None
        )

    def release_payloads(self) -> None:
        """The merge has them; the tape only needs the numbers (C87)."""
        for answer in self.answers.values():
            answer.payload = None


class Status(Enum):
    """Where an open round stands (C10)."""

    WAITING = "waiting for a new attempt"
    GATHERING = "gathering"
    COMPUTING = "computing"
    MERGED = "waiting for its turn"
    COMMITTING = "waiting for its checkpoint"


@dataclass(slots=True, eq=False)
class Round:
    """Round t from launch to commit.

    Attributes:
        step: t.
        fragment: p = (t - 1) mod F.
        attempt: the current one; None while waiting for a new one.
        attempts: how many have begun.
        retry_at: when a new attempt may start for the passing of time alone.
        retry_members: how many current groups let it start earlier, None for no such number.
        ticket: of the merge in progress.
        result, merge_seconds: what the merge gave.
        overflowed: ids whose groups were closed for this round (C34).
    """

    step: int
    fragment: int
    status: Status = Status.WAITING
    attempt: Attempt | None = None
    attempts: int = 0
    retry_at: float = 0.0
    retry_members: int | None = None
    ticket: int | None = None
    result: MergeResult | None = None
    merge_seconds: float = 0.0
    overflowed: set[int] = field(default_factory=set)

    def may_retry(self, current: int, now: float) -> bool:
        """Whether a new attempt starts, with `current` groups connected (C22)."""
        if current == 0:
            return False
        early = self.retry_members is not None and current >= self.retry_members
        return early or now >= self.retry_at


def merge_job(
    config: CoordinatorConfig,
    session: SessionFacts,
    round_: Round,
    attempt: Attempt,
    state: FragmentState,
) -> MergeJob:
    """Everything the merge of a gathered round needs; it owns its buffers (C30)."""
    return MergeJob(
        fragment=session.layout.fragments[round_.fragment],
        dtype=session.dtype,
        responses=attempt.responses(),
        params=state.params,
        momentum=state.momentum,
        settings=MergeSettings(
            lr=config.outer_lr_of(round_.fragment),
            momentum=config.outer_momentum,
            heloco=config.heloco,
            equal_weights=config.equal_weights,
        ),
    )
