"""One link per connection group: its messages become events, its commands become frames."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from syncer.events import (
    BudgetDoneReceived,
    Event,
    FinalAckReceived,
    HeartbeatReceived,
    InitReceived,
    Member,
    PushReceived,
)
from syncer.logs import RateLimited
from wire.errors import ProtocolError
from wire.messages import (
    Broadcast,
    BudgetDone,
    FinalAck,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    InitParams,
    Message,
    PullRequest,
    PushFragment,
    Shutdown,
)

if TYPE_CHECKING:
    from wire.group import Group


UNREMARKABLE = frozenset({"closed", "finished", "the peer closed the connection"})
"""Ends that the core's own line about the learner says enough of."""


class Link:
    """The sink of one group and the sender of everything that goes to it.

    Broadcasts are encoded off the loop, so they may be ready late: `wanted` says which version of
    a fragment is the newest that was ordered, and the final cut empties it. What is no longer
    wanted when it is ready is not sent; so the commands of one link keep their order.
    """

    def __init__(
        self,
        member: Member,
        left: Callable[[Member], None],
        post: Callable[[Event], None],
        log: RateLimited,
    ) -> None:
        self.member = member
        self.wanted: dict[int, int] = {}
        self._left = left
        self._post = post
        self._log = log
        self._group: Group | None = None

    def open(self, group: Group) -> None:
        """The group of this link exists now (W14)."""
        self._group = group

    @property
    def group(self) -> Group:
        """The connection group.

        Raises:
            RuntimeError: the link was used before `open`.
        """
        if self._group is None:
            raise RuntimeError(f"the link of {self.member} has no group yet")
        return self._group

    # -- from the wire ---------------------------------------------------------------------------

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """A message that passed W11 (the acceptor of a group's messages is its own sink)."""
        match message:
            case PushFragment():
                self._post(PushReceived(self.member, message, arrived))
            case Heartbeat(_, local_step):
                self._post(HeartbeatReceived(self.member, local_step, arrived))
            case InitParams(fragment, tensor):
                self._post(InitReceived(self.member, fragment, tensor))
            case FinalAck(step):
                self._post(FinalAckReceived(self.member, step))
            case BudgetDone(steps):
                self._post(BudgetDoneReceived(self.member, steps))
            case _:
                raise RuntimeError(f"{type(message).__name__} is not for a syncer")

    def on_bad_budget(self, group: Group) -> None:
        """A BUDGET_DONE that is not 8 bytes, in budget mode (C75)."""
        self._post(BudgetDoneReceived(self.member, None))

    def on_closed(self, group: Group, reason: str) -> None:
        """The group is gone; its messages were all delivered before (W39)."""
        level = logging.DEBUG if reason in UNREMARKABLE else logging.INFO
        if group.fault is not None:
            level = logging.WARNING
        self._log.log(
            level,
            "connection_ended",
            f"the connection of learner {self.member.learner_id} ended: {reason}",
            learner=self.member.learner_id,
            generation=self.member.generation,
            reason=reason,
        )
        self._left(self.member)

    # -- to the wire -----------------------------------------------------------------------------

    def pull(self, message: PullRequest) -> None:
        """PULL on stream 0, ahead of bulk (W45)."""
        self.group.send_control(message, (message.step, message.attempt))

    def drop_pull(self, step: int, attempt: int) -> None:
        """Take back the PULL of a closed attempt if it is still unsent (W45)."""
        self.group.withdraw_control((step, attempt))

    def broadcast(self, message: Broadcast) -> None:
        """Queue an encoded broadcast if it is still the newest ordered one (W46)."""
        if self.wanted.get(message.fragment) == message.version:
            self.group.send_bulk(message.fragment, message)

    def withdraw(self) -> None:
        """Drop every BCAST that is still unsent, or still being encoded.

        No PULL is unsent when a cut is ordered: their attempts were closed one by one.
        """
        for fragment in self.wanted:
            self.group.withdraw_bulk(fragment)
        self.wanted.clear()

    def cut(self, fragments: tuple[FinalFragment, ...], manifest: FinalManifest) -> bool:
        """Queue the final cut; whether all of it was queued on an open group (C60)."""
        group = self.group
        for message in fragments:
            group.send_bulk(("final", message.fragment), message)
        group.send_control(manifest)
        return not group.closed

    def shutdown(self) -> None:
        """SHUTDOWN on stream 0 (C64)."""
        self.group.send_control(Shutdown())

    def close(self, error: ProtocolError | None) -> None:
        """Close the whole group, with an ERROR when one is given (W38)."""
        self.group.close(error)
