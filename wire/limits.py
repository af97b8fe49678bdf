"""The limits of a role: one table, derived from the layout, checked before memory is taken.

Section 4 gives the caps by type; W11 the checks of a body once it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.frames import (
    CHUNK_BYTES,
    ERROR_READ_LIMIT,
    FRAME_BYTES,
    READABLE,
    SLICE_BYTES,
    MessageType,
    Role,
)
from wire.layout import NumericLayout
from wire.messages import (
    BUDGET_BYTES,
    FINAL_ACK_BYTES,
    HEARTBEAT_BYTES,
    INIT_HEAD_BYTES,
    MANIFEST_HEAD_BYTES,
    PULL_BYTES,
    PUSH_HEAD_BYTES,
    VERSIONED_HEAD_BYTES,
    Broadcast,
    Buffer,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    InitParams,
    Message,
    PullRequest,
    PushFragment,
)

LIMIT_CEILING = 2**63


@dataclass(frozen=True)
class Session:
    """What both ends of one connection group agreed on, seen from the reader `role`.

    Attributes:
        role: who reads.
        layout: sizes of all fragments.
        dtype: session dtype.
        learner_id: the group's id.
    """

    role: Role
    layout: NumericLayout
    dtype: DType
    learner_id: int

    @cached_property
    def payload_limits(self) -> dict[MessageType, tuple[int, int]]:
        """(least, most) payload bytes per readable type (section 4)."""
        largest = self.layout.max_numel
        bulk = self.dtype.bulk.size(largest)
        count = len(self.layout)
        table = {
            MessageType.INIT_PARAMS: (INIT_HEAD_BYTES, INIT_HEAD_BYTES + bulk),
            MessageType.PUSH_FRAGMENT: (
                PUSH_HEAD_BYTES,
                PUSH_HEAD_BYTES + self.dtype.size(largest),
            ),
            MessageType.BCAST_FRAGMENT: (VERSIONED_HEAD_BYTES, VERSIONED_HEAD_BYTES + bulk),
            MessageType.FINAL_FRAGMENT: (VERSIONED_HEAD_BYTES, VERSIONED_HEAD_BYTES + 4 * largest),
            MessageType.PULL_REQ: (PULL_BYTES, PULL_BYTES),
            MessageType.SHUTDOWN: (0, 0),
            MessageType.HEARTBEAT: (HEARTBEAT_BYTES, HEARTBEAT_BYTES),
            MessageType.FINAL_ACK: (FINAL_ACK_BYTES, FINAL_ACK_BYTES),
            MessageType.BUDGET_DONE: (BUDGET_BYTES, BUDGET_BYTES),
            MessageType.FINAL_MANIFEST: (MANIFEST_HEAD_BYTES + 8 * count,) * 2,
            MessageType.ERROR: (0, ERROR_READ_LIMIT),
            MessageType.CHUNK: (CHUNK_BYTES + 1, CHUNK_BYTES + SLICE_BYTES),
        }
        return {kind: table[kind] for kind in READABLE[self.role]}

    @cached_property
    def inner_limit(self) -> int:
        """Bytes of the largest legal frame inside CHUNKs, its 13-byte header included."""
        bulk = (
            (MessageType.INIT_PARAMS, MessageType.PUSH_FRAGMENT)
            if self.role is Role.SYNCER
            else (MessageType.BCAST_FRAGMENT, MessageType.FINAL_FRAGMENT)
        )
        return FRAME_BYTES + max(self.payload_limits[kind][1] for kind in bulk)

    def check_length(self, kind: MessageType, length: int) -> None:
        """Refuse a payload length from the header alone (W6, W8)."""
        least, most = self.payload_limits[kind]
        if least <= length <= most:
            return
        if least == most or length < least:
            expected = f"exactly {most}" if least == most else f"at least {least}"
            raise ProtocolError(
                ErrorCode.BAD_LENGTH, f"{kind.name} announces {length} bytes, expected {expected}"
            )
        raise ProtocolError(
            ErrorCode.TOO_LONG, f"{kind.name} announces {length} bytes, at most {most} are legal"
        )

    def check(self, message: Message) -> None:
        """Apply W11 to a decoded message, except the finiteness of tensor values."""
        match message:
            case Heartbeat():
                self._check_identity("HEARTBEAT", message.learner_id)
            case PullRequest():
                self._check_fragment("PULL", message.fragment)
                if message.attempt < 1:
                    raise ProtocolError(ErrorCode.ATTEMPT, "PULL has attempt 0")
            case InitParams(fragment, tensor):
                if self.learner_id != 0:
                    raise ProtocolError(
                        ErrorCode.INIT_FORBIDDEN,
                        f"learner {self.learner_id} sent INIT, only learner 0 initializes",
                    )
                self._check_tensor("INIT", fragment, tensor, self.dtype.bulk)
            case PushFragment():
                self._check_identity("PUSH", message.learner_id)
                self._check_tensor("PUSH", message.fragment, message.tensor, self.dtype)
                if message.attempt < 1 or message.c_steps < 1:
                    raise ProtocolError(
                        ErrorCode.ATTEMPT,
                        f"PUSH has attempt {message.attempt} and c_steps {message.c_steps}, "
                        "both must be at least 1",
                    )
            case Broadcast(fragment, _, tensor):
                self._check_tensor("BCAST", fragment, tensor, self.dtype.bulk)
            case FinalFragment(fragment, _, tensor):
                self._check_tensor("FINAL_FRAGMENT", fragment, tensor, DType.F32)
            case FinalManifest(_, versions):
                if len(versions) != len(self.layout):
                    raise ProtocolError(
                        ErrorCode.BAD_FRAGMENT,
                        f"the manifest lists {len(versions)} fragments, not {len(self.layout)}",
                    )
            case _:
                return

    def tensor_dtype(self, message: Message) -> DType | None:
        """Wire dtype of the message's tensor, None when it has none."""
        match message:
            case InitParams() | Broadcast():
                return self.dtype.bulk
            case PushFragment():
                return self.dtype
            case FinalFragment():
                return DType.F32
            case _:
                return None

    def _check_fragment(self, name: str, fragment: int) -> None:
        if fragment >= len(self.layout):
            raise ProtocolError(
                ErrorCode.BAD_FRAGMENT,
                f"{name} names fragment {fragment}, the session has {len(self.layout)}",
            )

    def _check_tensor(self, name: str, fragment: int, tensor: Buffer, dtype: DType) -> None:
        self._check_fragment(name, fragment)
        expected = dtype.size(self.layout.fragments[fragment].numel)
        if len(tensor) != expected:
            raise ProtocolError(
                ErrorCode.BAD_LENGTH,
                f"{name} of fragment {fragment} carries {len(tensor)} tensor bytes, "
                f"expected {expected}",
            )

    def _check_identity(self, name: str, learner_id: int) -> None:
        if learner_id != self.learner_id:
            raise ProtocolError(
                ErrorCode.IDENTITY,
                f"{name} repeats learner id {learner_id}, its group is learner {self.learner_id}",
            )


def check_limits_fit(layout: NumericLayout, dtype: DType) -> None:
    """Refuse a layout whose limits would reach 2^63 (W12 step 9)."""
    for role in Role:
        session = Session(role, layout, dtype, 0)
        if session.inner_limit >= LIMIT_CEILING:
            raise ProtocolError(
                ErrorCode.LAYOUT,
                f"a fragment of {layout.max_numel} elements makes messages of 2^63 bytes or more",
            )
