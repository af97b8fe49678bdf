"""Whole runs of the core under a simulated clock: learners that train, answer, come and go.

Deterministic: one heap of (time, number, action), no randomness of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from syncer import commands as c
from syncer import events as e
from syncer.config import CoordinatorConfig
from syncer.coordinator import Coordinator
from syncer.events import Member
from syncer.session import ResumeSource
from tests.syncer.core.harness import PROFILE, fake_merge, hello, vector
from wire.messages import PushFragment


@dataclass
class SimLearner:
    """One fake learner: `pace` seconds per step, `latency` seconds each way."""

    learner_id: int
    pace: float = 0.1
    latency: float = 0.01
    generation: int = 0
    connected: bool = False
    versions: dict[int, int] = field(default_factory=dict)
    based_at: dict[int, int] = field(default_factory=dict)
    started: float = 0.0
    shut_down: bool = False

    def local_step(self, now: float) -> int:
        return int((now - self.started) / self.pace)


class Simulation:
    """A syncer core, its actor and its learners, without a single real second."""

    def __init__(
        self,
        count_of_learners: int,
        *,
        fragments: int = 1,
        resumed: ResumeSource | None = None,
        merge_seconds: float = 0.005,
        save_seconds: float = 0.002,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {"profile": PROFILE, "sync_interval_steps": 0.0}
        self.core = Coordinator(CoordinatorConfig(**(defaults | config)), resumed)
        self.fragments = fragments
        self.merge_seconds = merge_seconds
        self.save_seconds = save_seconds
        self.learners = [SimLearner(learner_id) for learner_id in range(count_of_learners)]
        self.now = 0.0
        self.records: list[dict[str, Any]] = []
        self.saves: list[c.SaveCheckpoint] = []
        self.finish: c.Finish | None = None
        self.pulls = 0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._generation = count(1)
        self._token = count()

    # ---- the clock

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` that many seconds from now."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), action))

    def run(self, until: float) -> c.Finish | None:
        """Let time pass until the run is over, at most until `until` seconds."""
        while self.finish is None:
            deadline = self.core.next_deadline()
            due = self._queue[0][0] if self._queue else None
            if deadline is not None and (due is None or deadline < due):
                if deadline > until:
                    break
                self.now = deadline
                self.send(e.Tick())
            elif due is not None and due <= until:
                self.now, _, action = heapq.heappop(self._queue)
                action()
            else:
                break
        return self.finish

    # ---- the actor

    def send(self, event: e.Event) -> None:
        self.events += 1
        for command in self.core.handle(event, self.now):
            self._run_command(command)

    def _run_command(self, command: c.Command) -> None:
        match command:
            case c.SendPull():
                for member in command.members:
                    self._to(member, self._pulled, command)
            case c.SendBroadcast():
                for member in command.members:
                    self._to(member, self._broadcast, command)
            case c.SendCut():
                self.send(e.CutQueued(command.member))
                self._to(command.member, self._cut, command)
            case c.SendShutdown():
                self._to(command.member, self._shut_down, command)
            case c.CloseGroup():
                self._to(command.member, self._closed, command)
            case c.DecodeInit():
                values = tuple(vector() for _ in command.tensors)
                self._later(0.001, e.InitDecoded(command.ticket, values))
            case c.StartMerge():
                result = fake_merge(command.job)
                self._later(
                    self.merge_seconds, e.MergeDone(command.ticket, result, self.merge_seconds)
                )
            case c.SaveCheckpoint():
                self.saves.append(command)
                self._later(self.save_seconds, e.SaveDone(command.ticket))
            case c.WriteFinalState() | c.WriteMarker() | c.RemoveMarker() | c.DrainPool():
                self._later(0.001, e.TaskDone(command.ticket))
            case c.WriteTape():
                self.records.append(dict(command.record))
            case c.Finish():
                self.finish = command
            case _:
                pass

    def _later(self, seconds: float, event: e.Event) -> None:
        self.at(seconds, lambda: self.send(event))

    def _to(
        self, member: Member, action: Callable[[SimLearner, Any], None], command: c.Command
    ) -> None:
        learner = self.learners[member.learner_id]

        def arrive() -> None:
            if learner.connected and learner.generation == member.generation:
                action(learner, command)

        self.at(learner.latency, arrive)

    # ---- learners

    def connect(self, learner_id: int) -> None:
        learner = self.learners[learner_id]
        learner.generation = next(self._generation)
        learner.connected = True
        wanted = hello(learner_id, learner.generation, self.fragments)
        self.send(e.HelloReceived(next(self._token), wanted))
        if learner_id == 0 and len(learner.versions) < self.fragments:
            for fragment in range(self.fragments):
                self.send(e.InitReceived(self._member(learner), fragment, b"\0" * 8))

    def disconnect(self, learner_id: int) -> None:
        learner = self.learners[learner_id]
        if learner.connected:
            learner.connected = False
            self.send(e.GroupClosed(self._member(learner)))

    @staticmethod
    def _member(learner: SimLearner) -> Member:
        return Member(learner.learner_id, learner.generation)

    def _broadcast(self, learner: SimLearner, command: c.SendBroadcast) -> None:
        if command.version >= learner.versions.get(command.fragment, -1):
            learner.versions[command.fragment] = command.version
            learner.based_at[command.fragment] = learner.local_step(self.now)

    def _pulled(self, learner: SimLearner, pull: c.SendPull) -> None:
        """Answer at the first boundary with a base and a step since (L23)."""
        self.pulls += 1
        generation = learner.generation

        def boundary() -> None:
            if learner.generation != generation or not learner.connected:
                return
            step = learner.local_step(self.now)
            base = learner.versions.get(pull.fragment)
            steps = 0 if base is None else step - learner.based_at[pull.fragment]
            if base is None or steps < 1:
                self.at(learner.pace, boundary)
                return
            push = PushFragment(
                learner.learner_id,
                pull.fragment,
                pull.step,
                pull.attempt,
                base,
                step,
                steps,
                32 * steps,
                b"\0" * 8,
            )
            member = self._member(learner)
            self.at(learner.latency, lambda: self.send(e.PushReceived(member, push, self.now)))

        self.at(0.0, boundary)

    def _cut(self, learner: SimLearner, command: c.SendCut) -> None:
        member, step = self._member(learner), command.step
        self.at(learner.pace, lambda: self.send(e.FinalAckReceived(member, step)))

    def _shut_down(self, learner: SimLearner, command: c.SendShutdown) -> None:
        learner.shut_down = True

    def _closed(self, learner: SimLearner, command: c.CloseGroup) -> None:
        self.disconnect(learner.learner_id)

    # ---- what came of it

    @property
    def commits(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "step" in record]
