"""What the files of a case must prove before its result counts (C70 to C76); pure.

Each function returns the violations it found, one sentence each with the rule that is broken; an
empty list is the proof. Nothing is skipped because something earlier failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.budget.plan import Expected
from checkpoint.format import version_at
from checkpoint.snapshot import LedgerEntry
from syncer.tape import CommitRecord, EventRecord, TapeRecord

CONTRIBUTION_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What an inspection of a checkpoint file says.

    Attributes:
        problems: why `yeto-checkpoint verify` would refuse it.
        verified: its sums file vouches for every section (K15).
        marked: the marker names exactly its step (K21).
        has_marker: there is a file under the marker's name, whatever it says.
        leftovers: names of temporary files beside it.
    """

    step: int
    versions: tuple[int, ...]
    ledger: Mapping[int, LedgerEntry]
    fingerprint: bytes | None
    contract: bytes | None
    problems: tuple[str, ...]
    verified: bool
    marked: bool
    has_marker: bool
    leftovers: tuple[str, ...]


def events(records: Sequence[TapeRecord], name: str) -> list[EventRecord]:
    """The events of one name, in order."""
    return [r for r in records if isinstance(r, EventRecord) and r.event == name]


def commits(records: Sequence[TapeRecord]) -> list[CommitRecord]:
    """The commit records, in order."""
    return [record for record in records if isinstance(record, CommitRecord)]


# -- the cutoff process ------------------------------------------------------------------------


def check_cutoff(
    records: Sequence[TapeRecord], file: CheckpointFacts, expected: Expected
) -> list[str]:
    """The tape and the checkpoint that the cutoff process left."""
    return [
        *_checkpoint(file, expected, file.step),
        *_unmarked(file),
        *_cutoff_record(records, file.step, expected),
        *_whole_rounds(records, file.step),
        *_rounds_of_training(commits(records), expected),
        *_ledger_of_tape(commits(records), file.ledger),
    ]


def _unmarked(file: CheckpointFacts) -> Iterator[str]:
    if file.has_marker:
        yield "C74: the cutoff checkpoint has a marker beside it"


def _cutoff_record(records: Sequence[TapeRecord], step: int, expected: Expected) -> Iterator[str]:
    found = events(records, "cutoff")
    if len(found) != 1 or found[0] is not records[-1]:
        yield f"C74: {len(found)} cutoff records, wanted exactly one, at the end of the tape"
    for record in found:
        if record.fields.get("checkpoint_step") != step:
            yield (
                f"C74: the tape cuts off at step {record.fields.get('checkpoint_step')}, "
                f"the checkpoint holds step {step}"
            )
        ids = _ids(record.fields.get("members"))
        if ids != expected.ids:
            yield f"C74: budget reports of learners {ids}, wanted one each of {expected.ids}"
    for name in ("resume", "finalize", "error"):
        if events(records, name):
            yield f"C74: the cutoff process wrote a {name!r} record"


def _whole_rounds(records: Sequence[TapeRecord], step: int) -> Iterator[str]:
    """C72: what was open is gone as a whole, what was committed is contiguous up to C."""
    steps = [commit.step for commit in commits(records)]
    if steps != list(range(1, step + 1)):
        yield f"C32: the committed rounds are {_short(steps)}, wanted 1 to {step}"
    for record in events(records, "attempt_discarded"):
        if record.fields.get("reason") == "cutoff" and not record.fields.get("round", 0) > step:
            yield (
                f"C72: round {record.fields.get('round')} was discarded by the cutoff "
                f"and yet lies within the cut of step {step}"
            )


def _rounds_of_training(rounds: Sequence[CommitRecord], expected: Expected) -> Iterator[str]:
    """Answers while training: of known learners, with tokens in step with the steps (L21)."""
    for commit in rounds:
        for responder in commit.responders:
            if responder.id not in expected.ids:
                yield f"C71: learner {responder.id} answered round {commit.step}"
            if not 1 <= responder.c_steps <= expected.steps:
                yield (
                    f"L40: learner {responder.id} counts {responder.c_steps} steps in round "
                    f"{commit.step}, its budget is {expected.steps}"
                )
            if responder.c_tokens * expected.steps != responder.c_steps * expected.tokens:
                yield (
                    f"L21: learner {responder.id} counts {responder.c_tokens} tokens for "
                    f"{responder.c_steps} steps in round {commit.step}"
                )


def _ledger_of_tape(
    rounds: Sequence[CommitRecord], ledger: Mapping[int, LedgerEntry]
) -> Iterator[str]:
    """N21: the ledger is the sum of what the tape shows."""
    sums: dict[int, LedgerEntry] = {}
    for commit in rounds:
        for responder in commit.responders:
            merges, steps, tokens = sums.get(responder.id, LedgerEntry(0, 0, 0))
            sums[responder.id] = LedgerEntry(
                merges + 1, steps + responder.c_steps, tokens + responder.c_tokens
            )
    for learner in sorted({*sums, *ledger}):
        if sums.get(learner) != ledger.get(learner):
            yield (
                f"N21: the tape adds up to {_entry(sums.get(learner))} for learner {learner}, "
                f"the checkpoint's ledger says {_entry(ledger.get(learner))}"
            )


# -- the consolidation process -----------------------------------------------------------------


def check_consolidation(
    records: Sequence[TapeRecord],
    before: CheckpointFacts,
    after: CheckpointFacts,
    expected: Expected,
) -> list[str]:
    """The whole tape and the marked checkpoint, given what the cutoff left (C76)."""
    target = before.step + expected.fragments
    return [
        *_checkpoint(after, expected, target),
        *_marked(after),
        *_resumed(records, before.step),
        *_consolidation_rounds(records, before, expected),
        *_fresh_connections(records, before.step),
        *_finalized(records, target, expected),
        *_ledger_growth(before.ledger, after.ledger, expected),
    ]


def _marked(file: CheckpointFacts) -> Iterator[str]:
    if not file.marked:
        yield f"C66: the final checkpoint of step {file.step} is not marked"


def _resumed(records: Sequence[TapeRecord], step: int) -> Iterator[str]:
    found = events(records, "resume")
    if len(found) != 1:
        yield f"C43: {len(found)} resume records, wanted exactly one"
    for record in found:
        stated = (record.fields.get("checkpoint_step"), record.fields.get("tape_step"))
        if stated != (step, step or None):
            yield (
                f"C43: the resume record says checkpoint step {stated[0]} and tape step "
                f"{stated[1]}, the cutoff was at step {step}"
            )


def _consolidation_rounds(
    records: Sequence[TapeRecord], before: CheckpointFacts, expected: Expected
) -> Iterator[str]:
    """The gate of C76: all M learners in each of the F rounds, with exact counters (L42)."""
    first, count = before.step, expected.fragments
    rounds = commits(records)
    steps = [commit.step for commit in rounds]
    if steps != list(range(1, first + count + 1)):
        yield f"C76: the committed rounds are {_short(steps)}, wanted 1 to {first + count}"
    late = {commit.step: commit for commit in rounds if commit.step > first}
    for step in range(first + 1, first + count + 1):
        if step not in late:
            yield f"C76: round {step} of the consolidation is not on the tape"
        else:
            yield from _consolidation_round(late[step], before, expected)


def _consolidation_round(
    commit: CommitRecord, before: CheckpointFacts, expected: Expected
) -> Iterator[str]:
    where = f"in round {commit.step}"
    fragment = (commit.step - 1) % expected.fragments
    if commit.fragment != fragment:
        yield f"C10: fragment {commit.fragment} {where}, wanted {fragment}"
    for what, ids in (
        ("captured", [member.id for member in commit.expected]),
        ("answering", [member.id for member in commit.responded]),
        ("merged", [responder.id for responder in commit.responders]),
    ):
        if ids != expected.ids:
            yield f"C76: learners {ids} {what} {where}, wanted {expected.ids}"
    if commit.missed or commit.quorum != expected.learners:
        yield f"C76: a quorum of {commit.quorum} {where}, wanted all {expected.learners}"
    base = before.versions[fragment] if fragment < len(before.versions) else None
    if commit.launch_base_version != base:
        yield f"C76: launched from version {commit.launch_base_version} {where}, wanted {base}"
    for responder in commit.responders:
        who = f"learner {responder.id} {where}"
        if (responder.base_version, responder.staleness) != (base, 0):
            yield f"L42: {who} answered from version {responder.base_version}, wanted {base}"
        if responder.c_steps != expected.steps:
            yield f"L42: {who} counts {responder.c_steps} steps, its budget is {expected.steps}"
        if responder.c_tokens != expected.tokens:
            yield f"L42: {who} counts {responder.c_tokens} tokens, wanted {expected.tokens}"
        share = 1 / expected.learners
        if not math.isclose(responder.contribution, share, abs_tol=CONTRIBUTION_TOLERANCE):
            yield f"N5: {who} contributes {responder.contribution}, equal budgets give {share}"


def _fresh_connections(records: Sequence[TapeRecord], step: int) -> Iterator[str]:
    """L41: the answers of the consolidation come over connections that the cutoff never saw."""
    old: set[tuple[int, int]] = set()
    new: set[tuple[int, int]] = set()
    for commit in commits(records):
        (old if commit.step <= step else new).update(commit.expected)
    for record in events(records, "cutoff"):
        old |= {(m["id"], m["generation"]) for m in record.fields.get("members", ())}
    for learner, generation in sorted(old & new):
        yield f"L41: learner {learner} kept its connection {generation} across the restart"


def _finalized(records: Sequence[TapeRecord], step: int, expected: Expected) -> Iterator[str]:
    found = events(records, "finalize")
    if len(found) != 1:
        yield f"C60: {len(found)} finalize records, wanted exactly one"
    for record in found:
        if record.fields.get("checkpoint_step") != step:
            yield f"C60: finalized at step {record.fields.get('checkpoint_step')}, wanted {step}"
        ids = _ids(record.fields.get("members"))
        if ids != expected.ids:
            yield f"C60: the final cut went to learners {ids}, wanted {expected.ids}"
    for record in events(records, "error"):
        yield f"C42: the tape holds an error record: {record.fields.get('error')}"


def _ledger_growth(
    before: Mapping[int, LedgerEntry], after: Mapping[int, LedgerEntry], expected: Expected
) -> Iterator[str]:
    """Each learner gained F merges of its whole budget, and nobody else is there."""
    rounds = expected.fragments
    for learner in sorted({*expected.ids, *before, *after}):
        merges, steps, tokens = before.get(learner, LedgerEntry(0, 0, 0))
        wanted = LedgerEntry(
            merges + rounds, steps + rounds * expected.steps, tokens + rounds * expected.tokens
        )
        if learner not in expected.ids or after.get(learner) != wanted:
            yield (
                f"C76: the final ledger says {_entry(after.get(learner))} for learner {learner}, "
                f"wanted {_entry(wanted) if learner in expected.ids else 'nothing'}"
            )


# -- both --------------------------------------------------------------------------------------


def _checkpoint(file: CheckpointFacts, expected: Expected, step: int) -> Iterator[str]:
    for problem in file.problems:
        yield f"K16: the checkpoint is refused: {problem}"
    for name in file.leftovers:
        yield f"K14: {name} was left beside the checkpoint"
    if not file.verified:
        yield "K15: no sums file vouches for the checkpoint"
    if file.step != step:
        yield f"C76: the checkpoint holds step {file.step}, wanted {step}"
    count = expected.fragments
    versions = tuple(version_at(file.step, index, count) for index in range(count))
    if file.versions != versions:
        yield f"K5: versions {file.versions} at step {file.step}, wanted {versions}"
    if file.fingerprint != expected.fingerprint:
        yield "K18: the checkpoint has another layout than the learners"
    if file.contract != expected.contract:
        yield "K18: the checkpoint belongs to another experiment"


def check_artifacts(
    exported: Mapping[str, Tensor],
    models: Sequence[Mapping[str, Tensor]],
    results: Sequence[Mapping[str, Any]],
    step: int,
) -> list[str]:
    """Every learner saved the exported cut bit for bit, acknowledged at its step (L31, L36)."""
    found = []
    for learner, (model, result) in enumerate(zip(models, results, strict=True)):
        if model.keys() != exported.keys():
            found.append(f"L36: learner {learner} saved other tensors than the export has")
        found += [
            f"L31: {name} of learner {learner} differs from the exported cut"
            for name in sorted(model.keys() & exported.keys())
            if not same_bits(model[name], exported[name])
        ]
        if (result.get("step"), result.get("acknowledged")) != (step, True):
            found.append(
                f"L34: learner {learner} ended with step {result.get('step')}, acknowledged "
                f"{result.get('acknowledged')}; wanted step {step}, acknowledged"
            )
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two f32 tensors hold the same bytes, the sign of zero included."""
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))


def _ids(members: object) -> list[int]:
    return [member["id"] for member in members] if isinstance(members, list) else []


def _entry(entry: LedgerEntry | None) -> str:
    if entry is None:
        return "nothing"
    return f"{entry.merges} merges, {entry.steps} steps, {entry.tokens} tokens"


def _short(steps: list[int]) -> str:
    if len(steps) <= 8:
        return str(steps)
    return f"[{', '.join(map(str, steps[:4]))}, …, {', '.join(map(str, steps[-4:]))}]"
