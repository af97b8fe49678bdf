"""A driver for the coordinator core: fake groups, a fake disk, a fake merge, a simulated clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from syncer import commands as c
from syncer import events as e
from syncer.config import CoordinatorConfig
from syncer.coordinator import Coordinator, Phase
from syncer.events import Member
from syncer.merge.plan import MergeJob, MergeResult
from syncer.merge.weights import learner_weight
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.messages import Hello, PushFragment

PROFILE = b"p" * 32
PRINT = b"f" * 32
CONTRACT = b"c" * 32

T = TypeVar("T")


def layout(fragments: int) -> NumericLayout:
    """`fragments` fragments of one 2-element tensor each."""
    return NumericLayout(tuple(numeric_fragment(MergeMode.AVG, [2]) for _ in range(fragments)))


def hello(learner_id: int, generation: int, fragments: int = 1, **changes: Any) -> Hello:
    """A HELLO that passed steps 1 to 9 of W12."""
    fields: dict[str, Any] = {
        "learner_id": learner_id,
        "generation": generation,
        "dtype": DType.F32,
        "layout": layout(fragments),
        "fingerprint": PRINT,
        "contract": CONTRACT,
        "profile": None,
        "num_streams": 0,
    }
    return Hello(**(fields | changes))


@dataclass
class FakeGate:
    """What `FakeResume` demands of a HELLO."""

    fragments: int
    contract: bytes

    def check(self, wanted: Hello) -> None:
        if wanted.contract != self.contract or len(wanted.layout) != self.fragments:
            raise ProtocolError(ErrorCode.CHECKPOINT_MISMATCH, "contract-mismatch")


@dataclass
class FakeResume:
    """A checkpoint at `global_step` of the harness's session."""

    global_step: int
    fragments: int = 1
    ledger: dict[int, LedgerEntry] = field(default_factory=dict)
    contract: bytes = CONTRACT

    @property
    def ledger_ids(self) -> Iterable[int]:
        return self.ledger.keys()

    @property
    def gate(self) -> FakeGate:
        return FakeGate(self.fragments, self.contract)

    def snapshot_for(self, wanted: Hello) -> Snapshot:
        self.gate.check(wanted)
        states = tuple(
            FragmentState(version_at(self.global_step, p, self.fragments), vector(), vector())
            for p in range(self.fragments)
        )
        return Snapshot(0, PRINT, self.contract, self.global_step, states, self.ledger)


def version_at(step: int, fragment: int, fragments: int) -> int:
    """K5: the version of a fragment in the cut of a step."""
    first = fragment + 1
    return 0 if step < first else first + (step - first) // fragments * fragments


def vector(value: float = 0.0) -> torch.Tensor:
    return torch.full((2,), value)


def of_type(commands: Iterable[c.Command], kind: type[T]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


class Driver:
    """Feeds events to a core and answers what a cooperative machine would answer.

    With `auto` the decode, merge, save and task commands are answered at once; without it they
    pile up in `open_tasks` for the test to answer.
    """

    def __init__(
        self,
        *,
        fragments: int = 1,
        resumed: FakeResume | None = None,
        auto: bool = True,
        session: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "profile": PROFILE,
            "sync_interval_steps": 0.0,
            "checkpoint_every": 0,
        }
        self.config = CoordinatorConfig(**(defaults | config))
        self.core = Coordinator(self.config, resumed)
        self.fragments = fragments
        self.session = session or {}
        self.auto = auto
        self.now = 100.0
        self.token = 0
        self.log: list[c.Command] = []
        self.open_tasks: dict[int, c.Command] = {}
        self.saves: list[c.SaveCheckpoint] = []
        self.events: list[e.Event] = []

    # ---- events

    def send(self, event: e.Event) -> list[c.Command]:
        """One event, and with `auto` the answers to what it asked for; all commands together."""
        out = self.core.handle(event, self.now)
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now, "a deadline that has passed would spin"
        self.log += out
        for command in out:
            if isinstance(command, c.SaveCheckpoint):
                self.saves.append(command)
            if hasattr(command, "ticket"):
                self.open_tasks[command.ticket] = command
        total = list(out)
        if self.auto:
            for command in out:
                if isinstance(command, c.SendCut):
                    total += self.send(e.CutQueued(command.member))
            for ticket in list(self.open_tasks):
                if ticket in self.open_tasks:
                    total += self.answer(ticket)
        return total

    def answer(self, ticket: int) -> list[c.Command]:
        """Answer one open task with success."""
        command = self.open_tasks.pop(ticket)
        match command:
            case c.DecodeInit():
                count = len(command.tensors)
                return self.send(e.InitDecoded(ticket, tuple(vector() for _ in range(count))))
            case c.StartMerge():
                return self.send(e.MergeDone(ticket, fake_merge(command.job), 0.0))
            case c.SaveCheckpoint():
                return self.send(e.SaveDone(ticket))
            case _:
                return self.send(e.TaskDone(ticket))

    def answer_all(self, kind: type[c.Command]) -> list[c.Command]:
        """Answer every open task of one kind."""
        tickets = [ticket for ticket, task in self.open_tasks.items() if isinstance(task, kind)]
        return [command for ticket in tickets for command in self.answer(ticket)]

    def open_of(self, kind: type[T]) -> list[T]:
        return [task for task in self.open_tasks.values() if isinstance(task, kind)]

    def fail_save(self, reason: str = "disk full") -> list[c.Command]:
        """The open checkpoint write fails."""
        (save,) = self.open_of(c.SaveCheckpoint)
        del self.open_tasks[save.ticket]
        return self.send(e.SaveFailed(save.ticket, reason))

    def join(self, learner_id: int, generation: int = 1, **changes: Any) -> list[c.Command]:
        self.token += 1
        wanted = hello(learner_id, generation, self.fragments, **(self.session | changes))
        return self.send(e.HelloReceived(self.token, wanted))

    def leave(self, learner_id: int, generation: int = 1) -> list[c.Command]:
        return self.send(e.GroupClosed(Member(learner_id, generation)))

    def init(self, generation: int = 1, fragments: Iterable[int] | None = None) -> list[c.Command]:
        out = []
        for fragment in range(self.fragments) if fragments is None else fragments:
            out += self.send(e.InitReceived(Member(0, generation), fragment, b"\0" * 8))
        return out

    def push(
        self,
        learner_id: int,
        step: int,
        attempt: int = 1,
        *,
        generation: int = 1,
        base: int | None = None,
        local_step: int = 1,
        steps: int = 1,
        tokens: int = 10,
        fragment: int | None = None,
        arrived: float | None = None,
    ) -> list[c.Command]:
        base = max(0, step - self.fragments) if base is None else base
        fragment = (step - 1) % self.fragments if fragment is None else fragment
        push = PushFragment(
            learner_id, fragment, step, attempt, base, local_step, steps, tokens, b"\0" * 8
        )
        member = Member(learner_id, generation)
        return self.send(e.PushReceived(member, push, self.now if arrived is None else arrived))

    def beat(self, learner_id: int, local_step: int, generation: int = 1) -> list[c.Command]:
        member = Member(learner_id, generation)
        return self.send(e.HeartbeatReceived(member, local_step, self.now))

    def ack(self, learner_id: int, step: int, generation: int = 1) -> list[c.Command]:
        return self.send(e.FinalAckReceived(Member(learner_id, generation), step))

    def report(self, learner_id: int, steps: int | None, generation: int = 1) -> list[c.Command]:
        return self.send(e.BudgetDoneReceived(Member(learner_id, generation), steps))

    def signal(self) -> list[c.Command]:
        return self.send(e.StopSignal())

    def wait(self, seconds: float) -> list[c.Command]:
        """Let time pass, with a Tick at every deadline on the way."""
        out: list[c.Command] = []
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = deadline
            out += self.send(e.Tick())
        self.now = end
        return out

    # ---- what is known

    @property
    def phase(self) -> Phase:
        return self.core.phase

    @property
    def step(self) -> int:
        return self.core.global_step

    @property
    def finish(self) -> c.Finish:
        (finish,) = of_type(self.log, c.Finish)
        return finish

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """Commit records, or the records of one event."""
        found = [dict(command.record) for command in of_type(self.log, c.WriteTape)]
        return [r for r in found if (r.get("event") if event else "step" in r and None) == event]

    def started(self, learners: int, **init: Any) -> Driver:
        """Learners 0..n-1 join, learner 0 initializes."""
        for learner_id in range(learners):
            self.join(learner_id)
        self.init(**init)
        return self


def fake_merge(job: MergeJob) -> MergeResult:
    """A result that counts the commits in its parameters."""
    weights = tuple(
        learner_weight(r.c_tokens, r.c_steps, job.settings.equal_weights) for r in job.responses
    )
    return MergeResult(job.params + 1, job.momentum, 1.0, weights)
