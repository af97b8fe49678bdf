"""Every violation of C70 to C76 is caught in a doctored tape or checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.budget.checks import check_artifacts, check_consolidation, check_cutoff
from checkpoint.snapshot import LedgerEntry
from tests.benchmarks.budget_tapes import (
    CUT,
    FRAGMENTS,
    OLD,
    STEPS,
    WANTED,
    Fields,
    commit,
    cutoff_file,
    cutoff_tape,
    event,
    final_file,
    members,
    typed,
    whole_tape,
)

Doctor = Callable[[list[Fields]], object]


def of_event(tape: list[Fields], name: str) -> Fields:
    return next(record for record in tape if record.get("event") == name)


def of_round(tape: list[Fields], step: int) -> Fields:
    return next(record for record in tape if record.get("step") == step)


def cutoff_violations(doctor: Doctor) -> list[str]:
    tape = copy.deepcopy(cutoff_tape())
    doctor(tape)
    return check_cutoff(typed(tape), cutoff_file(), WANTED)


def consolidation_violations(doctor: Doctor) -> list[str]:
    tape = copy.deepcopy(whole_tape())
    doctor(tape)
    return check_consolidation(typed(tape), cutoff_file(), final_file(), WANTED)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 7])
def test_a_run_in_which_everything_holds(cut: int) -> None:
    assert check_cutoff(typed(cutoff_tape(cut)), cutoff_file(cut), WANTED) == []
    found = check_consolidation(typed(whole_tape(cut)), cutoff_file(cut), final_file(cut), WANTED)
    assert found == []


CUTOFF_DOCTORS: list[tuple[str, Doctor]] = [
    ("C74: 0 cutoff records", lambda tape: tape.pop()),
    ("C74: 2 cutoff records", lambda tape: tape.append(tape[-1])),
    ("C74: 1 cutoff records", lambda tape: tape.append(commit(6, 3, OLD, 7))),
    ("C74: the tape cuts off at step 4", lambda tape: tape[-1].update(checkpoint_step=4)),
    ("C74: budget reports of learners [0]", lambda tape: tape[-1]["members"].pop()),
    (
        "C74: budget reports of learners [0, 0]",
        lambda tape: tape[-1].update(members=[tape[-1]["members"][0]] * 2),
    ),
    ("C74: the cutoff process wrote a 'finalize'", lambda tape: tape.insert(0, event("finalize"))),
    ("C74: the cutoff process wrote a 'error'", lambda tape: tape.insert(0, event("error"))),
    ("C32: the committed rounds", lambda tape: tape.remove(of_round(tape, 3))),
    ("C32: the committed rounds", lambda tape: tape.insert(2, tape[1])),
    (
        "C72: round 5 was discarded",
        lambda tape: of_event(tape, "attempt_discarded").update(round=CUT),
    ),
    ("C71: learner 2", lambda tape: of_round(tape, 2)["responders"][1].update(id=2)),
    ("L40: learner 1", lambda tape: of_round(tape, 2)["responders"][1].update(c_steps=STEPS + 1)),
    ("L21: learner 0", lambda tape: of_round(tape, 2)["responders"][0].update(c_tokens=699)),
    ("N21: the tape adds up", lambda tape: of_round(tape, 5)["responders"].pop()),
]


@pytest.mark.parametrize(("wanted", "doctor"), CUTOFF_DOCTORS)
def test_a_doctored_cutoff_tape_is_caught(wanted: str, doctor: Doctor) -> None:
    assert any(text.startswith(wanted) for text in cutoff_violations(doctor))


def test_a_discard_for_another_reason_may_be_within_the_cut() -> None:
    """C21: an attempt that failed before its round committed is no whole-round cancellation."""

    def doctor(tape: list[Fields]) -> None:
        tape.insert(1, event("attempt_discarded", round=1, reason="quorum_timeout"))

    assert cutoff_violations(doctor) == []


@pytest.mark.parametrize(
    ("wanted", "change"),
    [
        ("C74: the cutoff checkpoint has a marker", {"has_marker": True}),
        ("K16: the checkpoint is refused: integrity", {"problems": ("integrity: header",)}),
        ("K15", {"verified": False}),
        ("K14: state.ckpt.tmp", {"leftovers": ("state.ckpt.tmp",)}),
        ("K5", {"versions": (4, 5, 2)}),
        ("K18: the checkpoint has another layout", {"fingerprint": b"x" * 32}),
        ("K18: the checkpoint has another layout", {"fingerprint": None}),
        ("K18: the checkpoint belongs to another", {"contract": WANTED.fingerprint}),
        ("N21", {"ledger": {0: LedgerEntry(CUT, 7 * CUT, 0)}}),
        ("C74: the tape cuts off", {"step": CUT + 1}),
    ],
)
def test_a_doctored_cutoff_checkpoint_is_caught(wanted: str, change: dict[str, object]) -> None:
    file = replace(cutoff_file(), **change)  # type: ignore[arg-type]
    assert any(text.startswith(wanted) for text in check_cutoff(typed(cutoff_tape()), file, WANTED))


LAST = CUT + FRAGMENTS


def drop_member(what: str, step: int = CUT + 2) -> Doctor:
    return lambda tape: of_round(tape, step)[what].pop()


CONSOLIDATION_DOCTORS: list[tuple[str, Doctor]] = [
    ("C76: the committed rounds", lambda tape: tape.append(commit(LAST + 1, 6, 200, STEPS))),
    ("C76: round 8 of the consolidation is not", lambda tape: tape.remove(of_round(tape, LAST))),
    ("C76: learners [0] captured in round 7", drop_member("expected_members")),
    ("C76: learners [0] answering in round 7", drop_member("responded_members")),
    ("C76: learners [0] merged in round 7", drop_member("responders")),
    ("C76: a quorum of 1", lambda tape: of_round(tape, 6).update(quorum=1)),
    ("C76: a quorum of 2", lambda tape: of_round(tape, 6).update(missed_members=members(200))),
    ("C10: fragment 0 in round 6", lambda tape: of_round(tape, 6).update(fragment=0)),
    ("C76: launched from version 6", lambda t: of_round(t, 8).update(launch_base_version=6)),
    ("L42: learner 1 in round 6", lambda t: of_round(t, 6)["responders"][1].update(staleness=3)),
    ("L42: learner 1 in round 6", lambda t: of_round(t, 6)["responders"][1].update(base_version=0)),
    ("L42: learner 0 in round 8", lambda t: of_round(t, 8)["responders"][0].update(c_steps=39)),
    ("L42: learner 0 in round 8", lambda t: of_round(t, 8)["responders"][0].update(c_tokens=3999)),
    ("N5: learner 0", lambda t: of_round(t, 8)["responders"][0].update(contribution=0.49)),
    ("C43: 0 resume", lambda tape: tape.remove(of_event(tape, "resume"))),
    ("C43: 2 resume", lambda tape: tape.append(of_event(tape, "resume"))),
    ("C43: the resume", lambda tape: of_event(tape, "resume").update(checkpoint_step=4)),
    ("C43: the resume", lambda tape: of_event(tape, "resume").update(tape_step=4)),
    (
        "L41: learner 0 kept its connection 100",
        lambda t: of_round(t, 6).update(expected_members=members(OLD)),
    ),
    ("C60: 0 finalize", lambda tape: tape.pop()),
    ("C60: finalized at step 7", lambda tape: tape[-1].update(checkpoint_step=7)),
    ("C60: the final cut went to learners [0]", lambda tape: tape[-1]["members"].pop()),
    ("C42", lambda tape: tape.append(event("error", error="disk"))),
]


@pytest.mark.parametrize(("wanted", "doctor"), CONSOLIDATION_DOCTORS)
def test_a_doctored_consolidation_tape_is_caught(wanted: str, doctor: Doctor) -> None:
    found = consolidation_violations(doctor)
    assert any(text.startswith(wanted) for text in found), found


@pytest.mark.parametrize(
    ("wanted", "change"),
    [
        ("C66: the final checkpoint of step 8 is not marked", {"marked": False}),
        ("K16", {"problems": ("versions: fragment 1",)}),
        ("K15", {"verified": False}),
        ("K14: state.ckpt.tmp", {"leftovers": ("state.ckpt.tmp",)}),
        ("C76: the checkpoint holds step 7", {"step": 7}),
        ("K5", {"versions": (7, 8, 3)}),
        ("K18: the checkpoint belongs to another", {"contract": None}),
        ("C76: the final ledger says nothing for learner 0", {"ledger": {}}),
    ],
)
def test_a_doctored_final_checkpoint_is_caught(wanted: str, change: dict[str, object]) -> None:
    file = replace(final_file(), **change)  # type: ignore[arg-type]
    found = check_consolidation(typed(whole_tape()), cutoff_file(), file, WANTED)
    assert any(text.startswith(wanted) for text in found), found


@pytest.mark.parametrize("field", ["merges", "steps", "tokens"])
def test_the_ledger_grows_by_exactly_the_consolidation(field: str) -> None:
    file = final_file()
    entry = file.ledger[1]
    doctored = entry._replace(**{field: getattr(entry, field) + 1})
    file = replace(file, ledger={**file.ledger, 1: doctored})
    found = check_consolidation(typed(whole_tape()), cutoff_file(), file, WANTED)
    assert [text.split(" says")[0] for text in found] == ["C76: the final ledger"]


def test_a_stranger_in_the_final_ledger_is_caught() -> None:
    file = final_file()
    file = replace(file, ledger={**file.ledger, 5: LedgerEntry(1, 1, 1)})
    found = check_consolidation(typed(whole_tape()), cutoff_file(), file, WANTED)
    assert any("for learner 5, wanted nothing" in text for text in found)


def test_artifacts_must_be_the_export_bit_for_bit() -> None:
    """L31, L34, L36."""
    exported = {"w": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])}
    good = {"step": 8, "acknowledged": True}
    assert check_artifacts(exported, [exported, exported], [good, good], 8) == []
    negative_zero = {**exported, "w": torch.tensor([-0.0, 1.0])}
    fewer = {"w": exported["w"]}
    found = check_artifacts(
        exported, [negative_zero, fewer], [{**good, "step": 7}, {**good, "acknowledged": False}], 8
    )
    assert [text.split(":")[0] for text in found] == ["L31", "L34", "L36", "L34"]
