"""What the coordinator core asks the actor to do, in order.

The actor runs the commands of one `handle` call in the order of the list. Commands with a `ticket`
run off the event loop and are answered by an event with the same ticket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncer.events import Member
from wire.errors import ProtocolError
from wire.messages import Buffer

if TYPE_CHECKING:
    from checkpoint.snapshot import Snapshot
    from syncer.merge.plan import MergeJob


@dataclass(frozen=True, slots=True)
class AcceptHello:
    """Register the connection `token` as the group `member` (W14)."""

    token: int
    member: Member


@dataclass(frozen=True, slots=True)
class RefuseHello:
    """Send ERROR on that socket and close it; nothing else changes (W13)."""

    token: int
    error: ProtocolError


@dataclass(frozen=True, slots=True)
class SendPull:
    """PULL on stream 0 of each captured group (C12)."""

    members: tuple[Member, ...]
    fragment: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DropPulls:
    """The attempt is closed: take back its PULLs that no socket has begun to send (W45).

    `members` are the captured ones that have not answered; some may be gone already.
    """

    members: tuple[Member, ...]
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SendBroadcast:
    """BCAST of `fragment` at `version` to each member; replaces an unsent older one (W46).

    `params` is the immutable f32 tensor; encoding is the actor's, once per (fragment, version).
    """

    members: tuple[Member, ...]
    fragment: int
    version: int
    params: Tensor


@dataclass(frozen=True, slots=True)
class SendCut:
    """The final cut to one group: FINAL_FRAGMENT 0..F-1, then the manifest (C60).

    Also drops every BCAST and PULL still unsent there. Answered by `CutQueued`.
    """

    member: Member
    step: int
    versions: tuple[int, ...]
    params: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class SendShutdown:
    """SHUTDOWN to one generation whose ACK was accepted (C64)."""

    member: Member


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Close a whole group, with an ERROR when one is given (W38).

    The core has forgotten the group with this command and ignores what still comes from it;
    `GroupClosed` must follow all the same, it frees the generation for W12 step 14.
    """

    member: Member
    error: ProtocolError | None


@dataclass(frozen=True, slots=True)
class DecodeInit:
    """Decode the complete INIT set to f32, off the loop; answered by `InitDecoded`."""

    ticket: int
    tensors: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class StartMerge:
    """Merge one complete round off the loop; answered by `MergeDone`, `MergeRefused`, `Failure`."""

    ticket: int
    job: MergeJob


class SaveKind(Enum):
    """Why a checkpoint is written (K11, K12)."""

    PERIODIC = "periodic"
    INITIAL = "initial"
    TERMINAL = "terminal"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write one immutable cut; answered by `SaveDone` or `SaveFailed`.

    The first `attempt` of a PERIODIC one may patch the spare; all others are full writes (C35).
    TERMINAL and RECOVERY (cutoff, second signal) also remove the spare afterwards (K14).
    """

    ticket: int
    kind: SaveKind
    snapshot: Snapshot
    attempt: int = 1

    @property
    def patch(self) -> bool:
        """Whether K12 may be used."""
        return self.kind is SaveKind.PERIODIC and self.attempt == 1

    @property
    def last(self) -> bool:
        """Whether the run ends with this file, so that the spare goes (K14)."""
        return self.kind in (SaveKind.TERMINAL, SaveKind.RECOVERY)


@dataclass(frozen=True, slots=True)
class WriteFinalState:
    """Write `--final-state` (only sent when configured); answered by `TaskDone`."""

    ticket: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class WriteMarker:
    """Declare the checkpoint of `step` final (K20); answered by `TaskDone`."""

    ticket: int
    step: int


@dataclass(frozen=True, slots=True)
class RemoveMarker:
    """Remove a stale marker durably (K22); answered by `TaskDone`."""

    ticket: int


@dataclass(frozen=True, slots=True)
class DrainPool:
    """Wait until the SVD pool has no work; answered by `TaskDone` or `Failure` (N33)."""

    ticket: int


@dataclass(frozen=True, slots=True)
class WriteTape:
    """Append one record, adding `ts`; a failure comes back as `Failure` (C35).

    Sent without `--event-tape` too: commit records (those with `step`) also feed progress lines.
    """

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Log:
    """One line for people: `level` is debug, info, warning or error."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Flush what is queued for at most `flush_seconds`, close everything, exit with `code`.

    `error` goes to every group that is still connected (C65, C82, C83).
    `reason` is the one line on stderr for a non-zero code (C84).
    """

    code: int
    reason: str
    error: ProtocolError | None = None
    flush_seconds: float = 0.0


Command = (
    AcceptHello
    | RefuseHello
    | SendPull
    | DropPulls
    | SendBroadcast
    | SendCut
    | SendShutdown
    | CloseGroup
    | DecodeInit
    | StartMerge
    | SaveCheckpoint
    | WriteFinalState
    | WriteMarker
    | RemoveMarker
    | DrainPool
    | WriteTape
    | Log
    | Finish
)
