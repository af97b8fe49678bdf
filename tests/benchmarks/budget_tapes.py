"""The tape and the checkpoints of a budget run in which everything holds, made to be doctored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.budget.checks import CheckpointFacts
from benchmarks.budget.plan import Expected
from checkpoint.format import version_at
from checkpoint.snapshot import LedgerEntry
from syncer.tape import TapeRecord, parse_record

FRAGMENTS = 3
CUT = 5
STEPS, TOKENS = 40, 4000
WANTED = Expected(
    learners=2,
    steps=STEPS,
    tokens=TOKENS,
    fragments=FRAGMENTS,
    fingerprint=b"f" * 32,
    contract=b"c" * 32,
)
OLD, NEW = 100, 200
"""Generations of learner 0 before and after the restart; those of learner 1 are one more."""

Fields = dict[str, Any]


def commit(step: int, base: int, generation: int, c_steps: int, cut: int = CUT) -> Fields:
    """The commit record of a round that both learners answered."""
    members = [{"id": number, "generation": generation + number} for number in range(2)]
    return {
        "protocol_version": 4,
        "ts": 1000.0 + step,
        "step": step,
        "fragment": (step - 1) % FRAGMENTS,
        "attempt": 1,
        "launch_base_version": base,
        "gnorm": 1.0,
        "ms": 20,
        "quorum": 2,
        "expected": [0, 1],
        "expected_members": members,
        "responded": [0, 1],
        "responded_members": members,
        "missed_grace": [],
        "missed_members": [],
        "quorum_ms": 10,
        "grace_ms": None,
        "sync_ms": 5,
        "responders": [
            {
                **member,
                "base_version": base,
                "staleness": 0,
                "c_steps": c_steps,
                "c_tokens": c_steps * TOKENS // STEPS,
                "weight": 1.0,
                "contribution": 0.5,
            }
            for member in members
        ],
        "rejected": {},
        "sync/layout_hash": WANTED.fingerprint.hex(),
    }


def event(name: str, **fields: Any) -> Fields:
    return {"event": name, "protocol_version": 4, "ts": 1.0, **fields}


def members(generation: int) -> list[dict[str, int]]:
    return [{"id": number, "generation": generation + number} for number in range(2)]


def cutoff_tape(cut: int = CUT) -> list[Fields]:
    """What the cutoff process leaves: start, rounds 1 to `cut`, a discarded one, the cutoff."""
    return [
        event("start", learners=2, quorum=2),
        *(
            commit(step, version_at(step - 1, (step - 1) % FRAGMENTS, FRAGMENTS), OLD, 7)
            for step in range(1, cut + 1)
        ),
        event("attempt_discarded", round=cut + 1, fragment=cut % FRAGMENTS, reason="cutoff"),
        event("cutoff", checkpoint_step=cut, members=members(OLD)),
    ]


def whole_tape(cut: int = CUT) -> list[Fields]:
    """The tape after the consolidation."""
    return [
        *cutoff_tape(cut),
        event("resume", checkpoint_step=cut, tape_step=cut or None),
        *(
            commit(step, version_at(cut, (step - 1) % FRAGMENTS, FRAGMENTS), NEW, STEPS)
            for step in range(cut + 1, cut + FRAGMENTS + 1)
        ),
        event("finalize", checkpoint_step=cut + FRAGMENTS, members=members(NEW)),
    ]


def typed(fields: list[Fields]) -> list[TapeRecord]:
    """As the tape's reader returns them."""
    return [parse_record(item) for item in fields]


def cutoff_file(cut: int = CUT) -> CheckpointFacts:
    """The checkpoint of the cutoff process."""
    entry = LedgerEntry(cut, 7 * cut, 7 * cut * TOKENS // STEPS)
    return CheckpointFacts(
        step=cut,
        versions=tuple(version_at(cut, index, FRAGMENTS) for index in range(FRAGMENTS)),
        ledger={0: entry, 1: entry} if cut else {},
        fingerprint=WANTED.fingerprint,
        contract=WANTED.contract,
        problems=(),
        verified=True,
        marked=False,
        has_marker=False,
        leftovers=(),
    )


def final_file(cut: int = CUT) -> CheckpointFacts:
    """The marked checkpoint of the consolidation."""
    entry = LedgerEntry(
        cut + FRAGMENTS,
        7 * cut + FRAGMENTS * STEPS,
        7 * cut * TOKENS // STEPS + FRAGMENTS * TOKENS,
    )
    step = cut + FRAGMENTS
    return replace(
        cutoff_file(cut),
        step=step,
        versions=tuple(version_at(step, index, FRAGMENTS) for index in range(FRAGMENTS)),
        ledger={0: entry, 1: entry},
        marked=True,
        has_marker=True,
    )
