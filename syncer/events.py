"""What the actor tells the coordinator core (coordinator.md C86).

Every event is handled by `Coordinator.handle(event, now)`; `now` is a monotonic clock in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from wire.messages import Buffer, Hello, PushFragment

if TYPE_CHECKING:
    from syncer.merge.plan import MergeResult


class Member(NamedTuple):
    """One connection group: who, and which of its connections. Sorts as N2 wants."""

    learner_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A HELLO passed steps 1 to 9 of W12 on the connection `token`.

    Answered, in the same `handle`, by `AcceptHello` or `RefuseHello` with the same token.
    """

    token: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """A group is gone; everything it sent completely has been delivered before (W39)."""

    member: Member


@dataclass(frozen=True, slots=True)
class InitReceived:
    """INIT that passed W11, bulk dtype bytes."""

    member: Member
    fragment: int
    tensor: Buffer


@dataclass(frozen=True, slots=True)
class PushReceived:
    """PUSH that passed W11; `arrived` is when its last byte was received (C2)."""

    member: Member
    push: PushFragment
    arrived: float


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """HEARTBEAT with the learner's local step; `arrived` as in `PushReceived`."""

    member: Member
    local_step: int
    arrived: float


@dataclass(frozen=True, slots=True)
class FinalAckReceived:
    """FINAL_ACK of revision 1."""

    member: Member
    step: int


@dataclass(frozen=True, slots=True)
class BudgetDoneReceived:
    """BUDGET_DONE; `steps` is None when its payload was not exactly 8 bytes (C75)."""

    member: Member
    steps: int | None


@dataclass(frozen=True, slots=True)
class InitDecoded:
    """All F fragments of the INIT set as f32 (answer to `DecodeInit`)."""

    ticket: int
    params: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class MergeDone:
    """The result of `StartMerge`, in new tensors; `seconds` is the compute time (C15)."""

    ticket: int
    result: MergeResult
    seconds: float


@dataclass(frozen=True, slots=True)
class MergeRefused:
    """N23: the merge or its outer step is not finite; `largest` has the largest gradient norm."""

    ticket: int
    largest: Member


@dataclass(frozen=True, slots=True)
class SaveDone:
    """The checkpoint of `SaveCheckpoint` is durable (K10)."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A checkpoint write failed; the coordinator decides whether to try again (C35)."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class TaskDone:
    """`DrainPool`, `WriteFinalState`, `WriteMarker` or `RemoveMarker` of this ticket is done."""

    ticket: int


@dataclass(frozen=True, slots=True)
class CutQueued:
    """All of the final cut was queued on this group, which is still open (C60)."""

    member: Member


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that ends the run with exit 1: poisoned pool, unwritable tape, internal error."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopSignal:
    """SIGINT or SIGTERM (C80 to C83)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline()` has passed."""


Event = (
    HelloReceived
    | GroupClosed
    | InitReceived
    | PushReceived
    | HeartbeatReceived
    | FinalAckReceived
    | BudgetDoneReceived
    | InitDecoded
    | MergeDone
    | MergeRefused
    | SaveDone
    | SaveFailed
    | TaskDone
    | CutQueued
    | Failure
    | StopSignal
    | Tick
)
