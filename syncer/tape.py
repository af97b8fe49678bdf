"""The event tape: JSON Lines of what the coordinator did (C40 to C43), written and read.

A record with the key `step` is the commit of that round; every other record has `event`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_READ_BYTES = 1 << 20


class TapeError(Exception):
    """The tape can't be opened, or a line of it is no record; the text names file and line."""


class TapeMember(NamedTuple):
    """One connection group, as the tape names it."""

    id: int
    generation: int


@dataclass(frozen=True, slots=True)
class TapeResponder:
    """What one accepted answer was and how much it counted."""

    id: int
    generation: int
    base_version: int
    staleness: int
    c_steps: int
    c_tokens: int
    weight: float
    contribution: float


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One committed round (C41); `fields` is the whole object. Times in Unix s and whole ms."""

    step: int
    fragment: int
    ts: float
    attempt: int
    launch_base_version: int
    gnorm: float
    ms: int
    quorum: int
    expected: tuple[TapeMember, ...]
    responded: tuple[TapeMember, ...]
    missed: tuple[TapeMember, ...]
    quorum_ms: int
    grace_ms: int | None
    sync_ms: int
    responders: tuple[TapeResponder, ...]
    rejected: Mapping[str, int]
    layout_hash: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Any other record (C42): `start`, `resume`, `attempt_discarded`, `finalize`, ..."""

    event: str
    ts: float
    fields: Mapping[str, Any]


TapeRecord = CommitRecord | EventRecord


def parse_record(fields: Mapping[str, Any]) -> TapeRecord:
    """Type one JSON object of a tape.

    Raises:
        KeyError, TypeError, ValueError: it is neither a commit record nor an event.
    """
    if "step" not in fields:
        return EventRecord(str(fields["event"]), float(fields["ts"]), fields)
    grace = fields["grace_ms"]
    return CommitRecord(
        step=int(fields["step"]),
        fragment=int(fields["fragment"]),
        ts=float(fields["ts"]),
        attempt=int(fields["attempt"]),
        launch_base_version=int(fields["launch_base_version"]),
        gnorm=float(fields["gnorm"]),
        ms=int(fields["ms"]),
        quorum=int(fields["quorum"]),
        expected=_members(fields["expected_members"]),
        responded=_members(fields["responded_members"]),
        missed=_members(fields["missed_members"]),
        quorum_ms=int(fields["quorum_ms"]),
        grace_ms=None if grace is None else int(grace),
        sync_ms=int(fields["sync_ms"]),
        responders=tuple(TapeResponder(**item) for item in fields["responders"]),
        rejected=dict(fields["rejected"]),
        layout_hash=str(fields["sync/layout_hash"]),
        fields=fields,
    )


def _members(items: list[dict[str, int]]) -> tuple[TapeMember, ...]:
    return tuple(TapeMember(item["id"], item["generation"]) for item in items)


def read_tape(path: str | Path) -> Iterator[TapeRecord]:
    """All records in file order. A torn last line (a write in progress, a crash) is left out.

    Raises:
        TapeError: a complete line is no record.
        OSError: the file can't be read.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_record(_object(line))
            except (ValueError, KeyError, TypeError) as error:
                raise TapeError(f"{path}: line {number} is no tape record: {error!r}") from error


def read_commits(path: str | Path) -> list[CommitRecord]:
    """The commit records of a tape, in t order as written."""
    return [record for record in read_tape(path) if isinstance(record, CommitRecord)]


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a line is not a JSON object")
    return value


class TapeWriter:
    """Appends records, each with one write call (C40). Not thread-safe; may block on the disk.

    Opening checks that the file can be written but changes nothing in a fresh run: a torn last
    line is cut off by the first append, so that a start refused later leaves the file as it was.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or create `path`.

        Raises:
            TapeError: it can't be opened for appending, or is not a regular file.
        """
        self.path = str(path)
        self._created = not os.path.exists(path)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TapeError(f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise TapeError(f"{path}: not a regular file")
        self._cut: int | None = None
        self._closed = False

    def resume(self, checkpoint_step: int) -> int | None:
        """Cut the tape to `checkpoint_step` and sync it (C43).

        Everything from the first commit record with a later step on goes, and a torn last line.

        Returns:
            The step of the last commit record kept, None if there is none.
        """
        scan = _scan(self._fd, checkpoint_step)
        self._truncate(scan.keep)
        os.fsync(self._fd)
        return scan.last_step

    def fresh(self) -> None:
        """Find a torn last line of an earlier run; the first append cuts it off."""
        keep = _scan(self._fd, None).keep
        if keep != os.fstat(self._fd).st_size:
            self._cut = keep

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and its LF.

        Raises:
            OSError: the write failed or was cut short (C35).
            ValueError: the record holds NaN or infinity.
        """
        if self._cut is not None:
            self._truncate(self._cut)
            self._cut = None
        text = json.dumps(record, allow_nan=False, ensure_ascii=False, separators=(", ", ": "))
        line = text.encode() + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def sync(self) -> None:
        """Make everything appended so far durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close; repeats are harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def abandon(self) -> None:
        """The start was refused: close, and remove the file if this process made it empty."""
        if self._closed:
            return
        empty = os.fstat(self._fd).st_size == 0
        self.close()
        if self._created and empty:
            os.unlink(self.path)

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)


class _Scan(NamedTuple):
    keep: int
    """Bytes from the start that stay."""
    last_step: int | None


def _scan(fd: int, checkpoint_step: int | None) -> _Scan:
    """Walk the lines up to the first commit past `checkpoint_step` (None: none is too late)."""
    keep = 0
    last: int | None = None
    size = os.fstat(fd).st_size
    with open(os.dup(fd), "rb", buffering=_READ_BYTES) as file:
        file.seek(0)
        for line in file:
            step = _line_step(line)
            at_end = keep + len(line)
            torn = not line.endswith(b"\n") or step is _NOT_A_RECORD
            if torn and at_end == size:
                break
            if isinstance(step, int):
                if checkpoint_step is not None and step > checkpoint_step:
                    break
                last = step
            keep = at_end
    return _Scan(keep, last)


_NOT_A_RECORD = object()


def _line_step(line: bytes) -> object:
    """The step of a commit record, None for another record, `_NOT_A_RECORD` for neither."""
    try:
        step = _object(line).get("step")
    except ValueError:
        return _NOT_A_RECORD
    return step if isinstance(step, int) and not isinstance(step, bool) else None
