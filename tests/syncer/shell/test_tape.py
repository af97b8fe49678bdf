"""The event tape: one write per record, truncation on resume, typed reading (C40 to C43)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.tape import (
    CommitRecord,
    EventRecord,
    TapeError,
    TapeMember,
    TapeWriter,
    read_commits,
    read_tape,
)


def commit(step: int) -> dict[str, Any]:
    return {
        "protocol_version": 4,
        "delta_semantics": "local_minus_raw_anchor",
        "ts": 1.5,
        "step": step,
        "fragment": 0,
        "launch_base_version": step - 1,
        "attempt": 1,
        "gnorm": 0.25,
        "ms": 12,
        "quorum": 1,
        "expected": [0, 3],
        "expected_members": [{"id": 0, "generation": 2**64 - 1}, {"id": 3, "generation": 9}],
        "responded": [0],
        "responded_members": [{"id": 0, "generation": 2**64 - 1}],
        "missed_grace": [3],
        "missed_members": [{"id": 3, "generation": 9}],
        "quorum_ms": 5,
        "grace_ms": None,
        "sync_ms": 3,
        "responders": [
            {
                "id": 0,
                "generation": 2**64 - 1,
                "base_version": step - 1,
                "staleness": 0,
                "c_steps": 2,
                "c_tokens": 64,
                "weight": 2048.0,
                "contribution": 1.0,
            }
        ],
        "rejected": {"duplicate": 1},
        "sync/layout_hash": "ab" * 32,
        "sync/base_version": step - 1,
        "sync/responders": 1,
        "sync/quorum": 1,
        "sync/rejected_stale_updates": 0,
        "sync/merge_seconds": 0.003,
        "sync/global_delta_norm": 0.25,
    }


def event(name: str) -> dict[str, Any]:
    return {"event": name, "ts": 1.0, "protocol_version": 4}


def write(path: Path, *records: dict[str, Any]) -> None:
    writer = TapeWriter(path)
    writer.fresh()
    for record in records:
        writer.append(record)
    writer.close()


def test_records_come_back_typed(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    write(path, event("start"), commit(1), commit(2))
    start, first, _ = read_tape(path)
    assert isinstance(start, EventRecord)
    assert start.event == "start"
    assert isinstance(first, CommitRecord)
    assert first.expected == (TapeMember(0, 2**64 - 1), TapeMember(3, 9))
    assert first.responders[0].weight == 2048.0
    assert first.rejected == {"duplicate": 1}
    assert first.fields == commit(1)
    assert [record.step for record in read_commits(path)] == [1, 2]


def test_each_record_is_one_line_of_utf8_json(tmp_path: Path) -> None:
    """C40."""
    path = tmp_path / "tape"
    write(path, event("fehlt\nzeile ü"), commit(1))
    lines = path.read_bytes().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == [event("fehlt\nzeile ü"), commit(1)]


def test_nan_never_reaches_the_tape(tmp_path: Path) -> None:
    """C40."""
    path = tmp_path / "tape"
    writer = TapeWriter(path)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            writer.append(event("error") | {"gnorm": value})
    writer.close()
    assert path.read_bytes() == b""


def test_a_torn_last_line_is_not_read_and_a_bad_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    path.write_text(json.dumps(commit(1)) + "\n" + '{"event": "sta')
    assert len(list(read_tape(path))) == 1
    path.write_text("[]\n" + json.dumps(commit(1)) + "\n")
    with pytest.raises(TapeError, match="line 1"):
        list(read_tape(path))


records = st.lists(
    st.one_of(
        st.integers(1, 12).map(commit),
        st.sampled_from(["start", "attempt_discarded", "resume"]).map(event),
    ),
    max_size=8,
)


@given(records, st.integers(0, 12), st.integers(0, 80))
def test_resume_cuts_at_the_first_later_commit_and_at_a_torn_line(
    tmp_path_factory: pytest.TempPathFactory,
    content: list[dict[str, Any]],
    checkpoint_step: int,
    torn: int,
) -> None:
    """C43, for any content and any tear."""
    path = tmp_path_factory.mktemp("tape") / "tape"
    lines = [json.dumps(record).encode() + b"\n" for record in content]
    tail = json.dumps(commit(1)).encode()[:torn]
    path.write_bytes(b"".join(lines) + tail)
    kept = []
    for record in content:
        if record.get("step", 0) > checkpoint_step:
            break
        kept.append(record)
    writer = TapeWriter(path)
    last = writer.resume(checkpoint_step)
    writer.append(event("resume"))
    writer.close()
    steps = [record["step"] for record in kept if "step" in record]
    assert last == (steps[-1] if steps else None)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
        *kept,
        event("resume"),
    ]


def test_zeros_after_a_power_loss_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    path.write_text(json.dumps(commit(1)) + "\n" + "\0" * 40 + "\n")
    writer = TapeWriter(path)
    assert writer.resume(5) == 1
    writer.close()
    assert path.read_text() == json.dumps(commit(1)) + "\n"


def test_a_fresh_run_appends_and_cuts_a_torn_line_only_when_it_writes(tmp_path: Path) -> None:
    """C4: a start that is refused later leaves the tape as it was."""
    path = tmp_path / "tape"
    torn = json.dumps(commit(7)) + "\n" + '{"event'
    path.write_text(torn)
    refused = TapeWriter(path)
    refused.fresh()
    refused.abandon()
    assert path.read_text() == torn
    write(path, event("start"))
    assert [type(record) for record in read_tape(path)] == [CommitRecord, EventRecord]


def test_a_refused_start_leaves_no_empty_tape(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    writer = TapeWriter(path)
    writer.abandon()
    assert not path.exists()


def test_an_unwritable_tape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="no/tape"):
        TapeWriter(tmp_path / "no" / "tape")
    with pytest.raises(TapeError):
        TapeWriter(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TapeError, match="regular"):
        TapeWriter(tmp_path / "pipe")


def test_a_short_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C35: a failed tape write is never silent."""
    writer = TapeWriter(tmp_path / "tape")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    with pytest.raises(OSError, match="only 3 of"):
        writer.append(event("start"))
    monkeypatch.undo()
    writer.close()
