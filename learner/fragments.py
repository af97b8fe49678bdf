"""What travels through a session per fragment: broadcasts in, anchors kept, answers out.

Values are opaque here, of any type `T`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from wire.errors import ErrorCode, ProtocolError
from wire.messages import PullRequest

T = TypeVar("T")


class Verdict(Enum):
    """What became of a received broadcast or final fragment (L24, L25)."""

    ACCEPTED = auto()
    REPLAYED = auto()
    DROPPED = auto()
    IGNORED = auto()


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """A fragment as it arrived: version, digest of the payload, values."""

    version: int
    digest: bytes
    values: T


@dataclass(frozen=True, slots=True)
class Anchor(Generic[T]):
    """The raw values of the last applied broadcast, and the counters at that moment (L21, L22)."""

    version: int
    digest: bytes
    values: T
    local_step: int
    units: int


@dataclass(frozen=True, slots=True)
class Apply(Generic[T]):
    """A broadcast to apply now.

    `blend` is False when training continues from it (L52); `previous` is the anchor that it ends.
    """

    fragment: int
    received: Received[T]
    blend: bool
    previous: T | None


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A PULL to answer now, with everything PUSH needs but the delta (L22, L23)."""

    pull: PullRequest
    generation: int
    base_version: int
    local_step: int
    c_steps: int
    c_tokens: int
    anchor: T


@dataclass
class FragmentState(Generic[T]):
    """Everything a session remembers of one fragment.

    Attributes:
        memory: version and digest of the last accepted broadcast (L24).
        memory_generation: the connection that delivered it.
        waiting: a broadcast that is to be applied at the next boundary.
        anchor: of the last applied one.
        final: newest fragment of the final cut (L25).
        answered: round of the newest PULL that was answered from the present anchor.
        saved: anchor of an earlier process, until the first broadcast confirms or replaces it
            (L52).
    """

    memory: tuple[int, bytes] | None = None
    memory_generation: int | None = None
    waiting: Received[T] | None = None
    anchor: Anchor[T] | None = None
    final: Received[T] | None = None
    answered: int | None = None
    saved: Anchor[T] | None = None


def monotonic(
    what: str, fragment: int, known: tuple[int, bytes] | None, received: Received[T]
) -> Verdict:
    """Whether a fragment is news: versions only grow (L24, L25).

    Args:
        what: for the error's text.
        fragment: for the error's text.
        known: version and digest of the newest accepted one.
        received: the one that came.

    Raises:
        ProtocolError: equal version, other digest.
    """
    if known is None or received.version > known[0]:
        return Verdict.ACCEPTED
    if received.version < known[0]:
        return Verdict.DROPPED
    if received.digest == known[1]:
        return Verdict.REPLAYED
    raise ProtocolError(
        ErrorCode.IDENTITY,
        f"the syncer sent {what} {fragment} at version {received.version} twice with different "
        "bytes",
    )
