"""Records of the event tape, without `ts`, which the actor adds (C41, C42)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from syncer.events import Member
from syncer.merge.plan import MergeResult
from syncer.rounds import Attempt, Round
from wire.frames import PROTOCOL_VERSION

DELTA_SEMANTICS = "local_minus_raw_anchor"


def event_record(event: str, **fields: object) -> dict[str, Any]:
    """Any record but a commit; it never has the key `step` (C42)."""
    return {"event": event, "protocol_version": PROTOCOL_VERSION, **fields}


def member_list(members: Iterable[Member]) -> list[dict[str, int]]:
    """[{id, generation}], in the given (numeric) order."""
    return [{"id": member.learner_id, "generation": member.generation} for member in members]


def milliseconds(seconds: float) -> int:
    """Whole milliseconds."""
    return round(seconds * 1000)


def discard_record(
    round_: Round, attempt: Attempt | None, reason: str, rejected: Mapping[str, int]
) -> dict[str, Any]:
    """`attempt_discarded`; without an attempt, the one that would have come next."""
    return event_record(
        "attempt_discarded",
        round=round_.step,
        fragment=round_.fragment,
        attempt=round_.attempts + 1 if attempt is None else attempt.number,
        reason=reason,
        quorum=0 if attempt is None else attempt.quorum,
        expected_members=[] if attempt is None else member_list(attempt.members),
        responded_members=[] if attempt is None else member_list(sorted(attempt.answers)),
        rejected=dict(rejected),
    )


def commit_record(
    round_: Round,
    attempt: Attempt,
    result: MergeResult,
    *,
    layout_hash: str,
    rejected: Mapping[str, int],
    total_seconds: float,
    sync_seconds: float,
) -> dict[str, Any]:
    """One committed round with every field of C41.

    Args:
        total_seconds: attempt start to broadcast queued.
        sync_seconds: compute and commit time (C15).
    """
    responded = [member for member in attempt.members if member in attempt.answers]
    missed = [member for member in attempt.members if member not in attempt.answers]
    sync_ms = milliseconds(sync_seconds)
    return {
        "protocol_version": PROTOCOL_VERSION,
        "delta_semantics": DELTA_SEMANTICS,
        "step": round_.step,
        "fragment": round_.fragment,
        "launch_base_version": attempt.launch_base,
        "attempt": attempt.number,
        "gnorm": result.gnorm,
        "ms": milliseconds(total_seconds),
        "quorum": attempt.quorum,
        "expected": [member.learner_id for member in attempt.members],
        "expected_members": member_list(attempt.members),
        "responded": [member.learner_id for member in responded],
        "responded_members": member_list(responded),
        "missed_grace": [member.learner_id for member in missed],
        "missed_members": member_list(missed),
        "quorum_ms": milliseconds(attempt.quorum_seconds),
        "grace_ms": None if attempt.grace is None else milliseconds(attempt.grace),
        "sync_ms": sync_ms,
        "responders": _responders(attempt, responded, result.weights),
        "rejected": dict(rejected),
        "sync/layout_hash": layout_hash,
        "sync/base_version": attempt.launch_base,
        "sync/responders": len(responded),
        "sync/quorum": attempt.quorum,
        "sync/rejected_stale_updates": rejected.get("stale", 0),
        "sync/merge_seconds": sync_ms / 1000,
        "sync/global_delta_norm": result.gnorm,
    }


def _responders(
    attempt: Attempt, responded: list[Member], weights: tuple[float, ...]
) -> list[dict[str, Any]]:
    total = sum(weights)
    found = []
    for member, weight in zip(responded, weights, strict=True):
        answer = attempt.answers[member]
        found.append(
            {
                "id": member.learner_id,
                "generation": member.generation,
                "base_version": answer.base_version,
                "staleness": attempt.launch_base - answer.base_version,
                "c_steps": answer.c_steps,
                "c_tokens": answer.c_tokens,
                "weight": weight,
                "contribution": weight / total,
            }
        )
    return found
