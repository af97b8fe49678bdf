"""What must hold of any run, watched from outside: events sent and commands seen (C1 to C83).

The watcher believes nothing of the core: what is live, durable, queued and acknowledged it knows
from the events that were sent and the commands that came back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from syncer import commands as c
from syncer.events import Member
from tests.syncer.core.harness import Driver, version_at

NOT_STATE = {"_rejected", "estimate", "_commands", "_handlers", "_tickets", "_due"}
"""Counters of refusals and estimates may move with a refused PUSH (C14, C20)."""


def state_of(value: object) -> object:
    """Everything inside the core as plain comparable data; tensors by identity."""
    if isinstance(value, Mapping):
        return [(repr(key), state_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return [state_of(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Tensor) or callable(value):
        return id(value)
    names = list(getattr(value, "__dict__", {})) + list(getattr(type(value), "__slots__", ()))
    if type(value).__module__.startswith(("syncer", "checkpoint", "tests")) and names:
        return {name: state_of(getattr(value, name)) for name in names if name not in NOT_STATE}
    return repr(value)


class Watcher:
    """Invariants over events sent and commands seen."""

    def __init__(self, driver: Driver, depth: int, first: int) -> None:
        self.driver = driver
        self.depth = depth
        self.committed = first - 1
        self.launched = first - 1
        self.attempts: dict[int, int] = {}
        self.captured: dict[tuple[int, int], tuple[Member, ...]] = {}
        self.pushed: set[tuple[Member, int, int]] = set()
        self.live: dict[int, list[int]] = {}
        self.current: dict[int, int] = {}
        self.durable = first - 1
        self.saving: dict[int, c.SaveCheckpoint] = {}
        self.queued: set[Member] = set()
        self.acked: set[Member] = set()
        self.acked_ids: set[int] = set()
        self.frozen: set[int] | None = None
        self.final_step: int | None = None
        self.quiet = False
        self.code: int | None = None

    # ---- what goes in

    def joined(self, member: Member) -> None:
        self.live.setdefault(member.learner_id, []).append(member.generation)
        self.current[member.learner_id] = member.generation

    def left(self, member: Member) -> None:
        generations = self.live.get(member.learner_id, [])
        if member.generation in generations:
            generations.remove(member.generation)
        if self.current.get(member.learner_id) == member.generation:
            del self.current[member.learner_id]

    def is_current(self, member: Member) -> bool:
        return self.current.get(member.learner_id) == member.generation

    # ---- what comes out

    def saw(self, command: c.Command) -> None:
        assert self.code is None, "nothing follows a Finish"
        match command:
            case c.AcceptHello():
                self.joined(command.member)
            case c.CloseGroup():
                self.left(command.member)
            case c.SendPull():
                self._pull(command)
            case c.SendBroadcast():
                self._broadcast(command)
            case c.SaveCheckpoint():
                self._save(command)
            case c.WriteTape():
                self._record(dict(command.record))
            case c.SendCut():
                self._cut(command)
            case c.WriteMarker():
                assert self.driver.config.mark_final
                assert self.driver.config.total_steps in (None, command.step)
                assert self.frozen is not None
                assert self.frozen <= self.acked_ids, "C66: after the last ack"
            case c.SendShutdown():
                assert command.member in self.acked, "C64"
            case c.Finish():
                self._finish(command)
            case _:
                pass

    def _pull(self, pull: c.SendPull) -> None:
        assert not self.quiet, "no PULL after the gate closed or the freeze"
        assert pull.fragment == (pull.step - 1) % self.driver.fragments
        assert list(pull.members) == sorted(pull.members)
        assert pull.members
        assert {m.learner_id: m.generation for m in pull.members} == self.current, "C12, C19"
        assert pull.attempt == self.attempts.get(pull.step, 0) + 1, "C21"
        if pull.attempt == 1:
            assert pull.step == self.launched + 1, "C10: strictly in t order, none skipped"
            self.launched = pull.step
            total = self.driver.config.total_steps
            assert total is None or pull.step <= total
        assert self.launched - self.committed <= self.depth, "C10"
        self.attempts[pull.step] = pull.attempt
        self.captured[pull.step, pull.attempt] = pull.members

    def _broadcast(self, command: c.SendBroadcast) -> None:
        assert not self.quiet, "C36, C72"
        assert command.members
        for member in command.members:
            assert self.is_current(member), "C19: only current groups"
        assert command.version in (0, *range(self.durable_version_floor(), self.launched + 1))
        if self.driver.config.checkpoint_every == 1:
            assert command.version <= self.durable, "C32: durable before broadcast"

    def durable_version_floor(self) -> int:
        """No fragment is ever further behind than F rounds."""
        return max(0, self.committed - self.driver.fragments)

    def _save(self, save: c.SaveCheckpoint) -> None:
        assert not self.saving, "one write at a time"
        self.saving[save.ticket] = save
        step = save.snapshot.global_step
        versions = [state.version for state in save.snapshot.fragments]
        count = self.driver.fragments
        assert versions == [version_at(step, p, count) for p in range(count)], "K5"
        if save.kind is c.SaveKind.TERMINAL:
            self.quiet = True
            self.final_step = step

    def _record(self, record: dict[str, Any]) -> None:
        if record.get("event") == "finalize":
            self.frozen = {member["id"] for member in record["members"]}
            assert record["checkpoint_step"] == self.durable == self.final_step
        if "step" not in record:
            return
        step, attempt = record["step"], record["attempt"]
        assert step == self.committed + 1, "C31"
        assert attempt == self.attempts[step], "the latest attempt"
        captured = self.captured[step, attempt]
        responded = [Member(m["id"], m["generation"]) for m in record["responded_members"]]
        assert set(responded) <= set(captured), "captured members only"
        for member in responded:
            assert (member, step, attempt) in self.pushed, "each answered this very attempt"
        quorum = min(self.driver.config.quorum, len(captured))
        assert record["quorum"] == quorum
        assert len(responded) >= quorum, "each commit had its quorum"
        assert [r["id"] for r in record["responders"]] == [m.learner_id for m in responded]
        self.committed = step

    def _cut(self, cut: c.SendCut) -> None:
        assert self.is_current(cut.member)
        assert cut.step == self.final_step
        assert self.durable == cut.step, "the terminal checkpoint comes first"
        count = self.driver.fragments
        assert list(cut.versions) == [version_at(cut.step, p, count) for p in range(count)]

    def _finish(self, finish: c.Finish) -> None:
        self.code = finish.code
        assert (finish.code == 0) == (not finish.reason), "C84"
        if finish.code == 0 and self.frozen:
            assert self.frozen <= self.acked_ids, "C65: all frozen ids"
