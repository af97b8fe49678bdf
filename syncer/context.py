"""What the parts of the coordinator core share: configuration, state, output, open questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from syncer.commands import CloseGroup, Command, Finish, Log, WriteTape
from syncer.config import CoordinatorConfig
from syncer.events import (
    InitDecoded,
    Member,
    MergeDone,
    MergeRefused,
    SaveDone,
    SaveFailed,
    TaskDone,
)
from syncer.membership import Membership
from syncer.records import event_record
from syncer.session import SessionFacts
from syncer.state import Model
from wire.errors import ErrorCode, ProtocolError

Answer = InitDecoded | MergeDone | MergeRefused | SaveDone | SaveFailed | TaskDone
"""Events that answer a command with a ticket."""
Handler = Callable[[Any, float], None]


class Phase(Enum):
    """C3, with two more: ENDING waits for a last checkpoint before exit 1, FINISHED is silent."""

    INIT = "init"
    RUN = "run"
    DRAIN = "drain"
    FREEZE = "freeze"
    DELIVER = "deliver"
    DONE = "done"
    CUTOFF = "cutoff"
    ENDING = "ending"
    FINISHED = "finished"


FINALIZING = frozenset({Phase.FREEZE, Phase.DELIVER, Phase.DONE})


class Context:
    """The blackboard of one run. Only code called from `Coordinator.handle` touches it (C1).

    Attributes:
        session: what all HELLOs share, None before the first accepted one (W18).
        model: step, fragments and ledger, None until all fragments are initialized.
        dropped: counts of messages that came at the wrong time, by kind (C6, C63).
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.phase = Phase.INIT
        self.members = Membership()
        self.session: SessionFacts | None = None
        self.model: Model | None = None
        self.dropped: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._commands: list[Command] = []
        self._tickets: dict[int, Handler] = {}
        self._last_ticket = 0

    def emit(self, command: Command) -> None:
        """Add a command to the answer of this `handle`; nothing follows a `Finish`."""
        if self.phase is not Phase.FINISHED:
            self._commands.append(command)

    def take_commands(self) -> list[Command]:
        """What was emitted since the last call."""
        commands, self._commands = self._commands, []
        return commands

    def ask(self, make: Callable[[int], Command], handler: Handler) -> int:
        """Emit a command with a fresh ticket; `handler(event, now)` gets its answer."""
        self._last_ticket += 1
        self._tickets[self._last_ticket] = handler
        self.emit(make(self._last_ticket))
        return self._last_ticket

    def forget(self, ticket: int | None) -> None:
        """The answer to this ticket is no longer wanted and will be ignored."""
        if ticket is not None:
            self._tickets.pop(ticket, None)

    def answered(self, event: Answer, now: float) -> None:
        """Hand an answer to whoever asked; a stale one is ignored."""
        handler = self._tickets.pop(event.ticket, None)
        if handler is not None:
            handler(event, now)

    def drop(self, kind: str) -> None:
        """Count a message that is silently dropped."""
        self.dropped[kind] = self.dropped.get(kind, 0) + 1

    def reject(self, reason: str) -> None:
        """Count a refused PUSH for the next tape record (C20, C41)."""
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def take_rejected(self) -> dict[str, int]:
        """Refusals by reason since the previous record."""
        rejected, self._rejected = self._rejected, {}
        return rejected

    def close(self, member: Member, error: ProtocolError) -> bool:
        """Close a group with ERROR and forget it at once; False when it is not live."""
        if self.members.remove(member, closing=True) is None:
            return False
        self.log("warning", f"learner {member.learner_id} is closed: {error.text}")
        self.emit(CloseGroup(member, error))
        return True

    def log(self, level: str, text: str) -> None:
        """One line for people."""
        self.emit(Log(level, text))

    def record(self, record: Mapping[str, Any]) -> None:
        """One line for the event tape."""
        self.emit(WriteTape(record))

    def finish(
        self, reason: str = "", error: ProtocolError | None = None, flush: float = 0
    ) -> None:
        """End the run: exit 1 with a `reason`, else exit 0 (C84)."""
        if reason:
            self.record(event_record("error", error=reason))
        self.emit(Finish(1 if reason else 0, reason, error, flush))
        self.phase = Phase.FINISHED

    def fail(self, reason: str) -> None:
        """End the run with exit 1; once finalizing, every connected group is told (FAIL)."""
        error = None
        if self.phase in FINALIZING:
            error = ProtocolError(ErrorCode.STOPPED, f"the syncer failed: {reason}")
        self.finish(reason, error)
