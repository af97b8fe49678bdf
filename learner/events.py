"""What a learner reports: the answer of each step, counters, and typed events (L70, L71)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one call of `Learner.step` did (L70).

    Attributes:
        local_step: optimizer steps so far.
        applied: fragments whose broadcast was blended at this boundary.
        pushed: fragments whose PULL was answered at this boundary.
        pending_pulls: PULLs still waiting.
        connected: a connection group is up.
        finalizing: the final manifest is known.
        stop: the cut is applied and acknowledged (in a baseline: `max_local_steps` reached).
    """

    local_step: int
    applied: tuple[int, ...] = ()
    pushed: tuple[int, ...] = ()
    pending_pulls: int = 0
    connected: bool = False
    finalizing: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a run (L36).

    Attributes:
        step: global step of the applied cut.
        versions: version per fragment of the cut.
        fingerprint: layout fingerprint, hex.
        contract: session contract, hex.
        learner_id: ours.
        local_step: optimizer steps done.
        acknowledged: FINAL_ACK was written to the connection.
    """

    step: int
    versions: tuple[int, ...]
    fingerprint: str
    contract: str
    learner_id: int
    local_step: int
    acknowledged: bool


@dataclass(slots=True)
class Counters:
    """Totals since the start of the process (L71).

    `push_bytes` counts tensor payload bytes handed to the connection, `received_bytes` those that
    came; `delta_norm` is the L2 norm of the newest pushed delta; `stale_steps` are the own
    optimizer steps since the broadcast was applied that is the longest ago, over all fragments;
    `step_seconds` is the time spent inside `Learner.step`.
    """

    merges_applied: int = 0
    pushes: int = 0
    push_bytes: int = 0
    received_bytes: int = 0
    stale_steps: int = 0
    delta_norm: float = 0.0
    pending_pulls: int = 0
    redials: int = 0
    dropped_broadcasts: int = 0
    replayed_broadcasts: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BroadcastApplied:
    """A broadcast was blended into the model."""

    fragment: int
    version: int
    local_step: int


@dataclass(frozen=True, slots=True)
class PushSent:
    """A delta was encoded and queued for the syncer. `size`: tensor bytes on the wire."""

    fragment: int
    step: int
    attempt: int
    base_version: int
    c_steps: int
    c_tokens: int
    size: int
    delta_norm: float


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A connection group is up. `outage_s` is None for the first one."""

    generation: int
    outage_s: float | None


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The connection group was lost; training goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finalizing:
    """The final manifest arrived: the loop waits for the cut of global step `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class StateSaved:
    """The durable local state of `local_step` is on disk (L50)."""

    local_step: int
    path: str


Event = BroadcastApplied | PushSent | LinkUp | LinkDown | Finalizing | StateSaved
