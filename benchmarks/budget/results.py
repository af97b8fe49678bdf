"""`results.jsonl`: one line per finished case, appended and synced, so that a run can go on later.

The last line of a case counts. A line torn by a crash is cut off when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = "yeto-budget-results-v1"


class ResultsRefused(Exception):
    """The file cannot be continued; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one case came to. Losses in nats per byte, None where the case did not get that far.

    Attributes:
        key: `arm/seedN`.
        name: the arm, or `baseline-mM`.
        identity: of the configuration (`plan.identity`).
        passed: every check held.
        violations: every check that did not hold, or what went wrong.
        tokens: the budget of all learners together.
        cutoff_step, fragments: C and F.
        replay_difference: relative distance of the final checkpoint from the replay.
        bits_equal: the replay gave the same bits.
    """

    key: str
    name: str
    learners: int
    seed: int
    identity: str
    passed: bool
    violations: tuple[str, ...]
    tokens: int
    wall_s: float
    initial_loss: float | None = None
    held_out_loss: float | None = None
    cutoff_step: int | None = None
    fragments: int | None = None
    replay_difference: float | None = None
    bits_equal: bool | None = None
    format: str = field(default=FORMAT)

    def to_line(self) -> bytes:
        """One JSON object and an LF; NaN and infinity are an error, not a value."""
        return json.dumps(asdict(self), allow_nan=False).encode() + b"\n"


def parse_line(line: bytes) -> Record:
    """A line of the file.

    Raises:
        ValueError: it is no record.
    """
    document = json.loads(line)
    names = {item.name for item in fields(Record)}
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT} record")
    if document.keys() != names:
        raise ValueError(f"fields {sorted(document.keys() ^ names)} are missing or unknown")
    found: dict[str, Any] = {**document, "violations": tuple(document["violations"])}
    return Record(**found)


class Results:
    """The file, open for appending."""

    def __init__(self, path: Path, identity: str, *, resume: bool) -> None:
        """
        Args:
            path: of the file; made when missing.
            identity: of this configuration; every record there must have the same.
            resume: go on with a file that holds records.

        Raises:
            ResultsRefused: there are records and `resume` is off, or they are of another
                configuration, or a line is no record.
        """
        self._path = path
        self._identity = identity
        records, keep = self._read(path.read_bytes() if path.exists() else b"")
        if records and not resume:
            raise ResultsRefused(
                f"{path} holds {len(records)} records; go on with --resume, or choose another "
                "--output"
            )
        self._records = {record.key: record for record in records}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, keep)

    def _read(self, data: bytes) -> tuple[list[Record], int]:
        records: list[Record] = []
        keep = 0
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = parse_line(line)
            except (ValueError, TypeError) as error:
                raise ResultsRefused(f"{self._path}: line {number}: {error}") from error
            if record.identity != self._identity:
                raise ResultsRefused(
                    f"{self._path}: line {number} is of another configuration (sizes or data "
                    f"differ: {record.identity[:12]}, now {self._identity[:12]}); give the same "
                    "options, or choose another --output"
                )
            records.append(record)
            keep += len(line)
        return records, keep

    def finished(self, key: str) -> bool:
        """Whether a case passed before; one that failed is run again."""
        return key in self._records and self._records[key].passed

    def add(self, record: Record) -> None:
        """Append and sync one record."""
        line = record.to_line()
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written to {self._path}")
        os.fsync(self._fd)
        self._records[record.key] = record

    def of(self, keys: Iterable[str]) -> list[Record]:
        """The records of cases, in their order; cases without one are left out."""
        return [self._records[key] for key in keys if key in self._records]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
