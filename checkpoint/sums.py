"""The integrity side file `P.sums` (K15): digests of every section of the newest two steps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from checkpoint.codec import FragmentScan, Source, Structure, digest_range
from checkpoint.files import open_to_read
from checkpoint.loading import LoadedFragment

FORMAT = "yeto-checkpoint-sums-v1"
ALGORITHM = "blake2b-128"
MAX_ENTRIES = 2
MAX_SUMS_BYTES = 256 << 20
"""A side file beyond this is not ours: it would describe more than a million fragments."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FragmentSum:
    """One fragment's line."""

    version: int
    numel: int
    digest: str


@dataclass(frozen=True, slots=True)
class SumsEntry:
    """What a complete file of one step looks like; the fields are the keys of the JSON."""

    global_step: int
    bytes: int
    header: str
    fragments: tuple[FragmentSum, ...]
    tail: str


def encode_sums(entries: Sequence[SumsEntry]) -> bytes:
    """The whole side file, entries oldest first, one trailing LF."""
    document = {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        "entries": [asdict(entry) for entry in entries],
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def parse_sums(data: bytes) -> tuple[SumsEntry, ...] | None:
    """The entries, or None where this is not exactly a side file of K15."""
    try:
        document = json.loads(data)
        if _keys(document) != {"format", "algorithm", "entries"}:
            return None
        if (document["format"], document["algorithm"]) != (FORMAT, ALGORITHM):
            return None
        entries = tuple(_entry(item) for item in document["entries"])
    except (ValueError, TypeError, RecursionError):
        return None
    steps = [entry.global_step for entry in entries]
    if len(entries) > MAX_ENTRIES or len(set(steps)) != len(steps):
        return None
    return entries


def read_sums(path: Path) -> tuple[SumsEntry, ...]:
    """The entries of a side file; none when it is missing or unreadable (K15: "unverified")."""
    try:
        with open(open_to_read(path), "rb") as file:
            # The size first: a bounded read would take the memory of its bound.
            if os.fstat(file.fileno()).st_size > MAX_SUMS_BYTES:
                return ()
            data = file.read()
    except OSError:
        return ()
    return parse_sums(data) or ()


def recorded_step(path: Path, step: int) -> SumsEntry | None:
    """What the side file at `path` says about a file of `step`, None where it says nothing."""
    return next((entry for entry in read_sums(path) if entry.global_step == step), None)


def entry_of(
    source: Source, structure: Structure, scans: Sequence[LoadedFragment | FragmentScan]
) -> SumsEntry:
    """The entry that describes a file whose fragments were just read."""
    return SumsEntry(
        global_step=structure.header.global_step,
        bytes=structure.size,
        header=digest_range(source, 0, structure.header.size),
        fragments=tuple(
            FragmentSum(head.version, head.numel, scan.digest)
            for head, scan in zip(structure.fragments, scans, strict=True)
        ),
        tail=digest_range(source, structure.tail_offset, structure.size),
    )


def damaged_sections(recorded: SumsEntry, actual: SumsEntry) -> Iterator[str]:
    """Names of the sections of a file that are not as its entry recorded them (K15)."""
    if recorded.bytes != actual.bytes:
        yield f"size ({actual.bytes} bytes, {recorded.bytes} were written)"
    if recorded.header != actual.header:
        yield "header"
    if len(recorded.fragments) != len(actual.fragments):
        yield f"fragment count ({len(actual.fragments)}, {len(recorded.fragments)} were written)"
    for index, pair in enumerate(zip(recorded.fragments, actual.fragments, strict=False)):
        if pair[0] != pair[1]:
            yield f"fragment {index}"
    if recorded.tail != actual.tail:
        yield "tail"


def _entry(item: Any) -> SumsEntry:
    if _keys(item) != {field.name for field in fields(SumsEntry)}:
        raise ValueError("an entry has other keys")
    return SumsEntry(
        _count(item["global_step"]),
        _count(item["bytes"]),
        _hex(item["header"]),
        tuple(_fragment(fragment) for fragment in item["fragments"]),
        _hex(item["tail"]),
    )


def _fragment(item: Any) -> FragmentSum:
    if _keys(item) != {field.name for field in fields(FragmentSum)}:
        raise ValueError("a fragment has other keys")
    return FragmentSum(_count(item["version"]), _count(item["numel"]), _hex(item["digest"]))


def _keys(item: Any) -> set[str]:
    if not isinstance(item, dict):
        raise TypeError("not an object")
    return set(item)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError("not a u64")
    return value


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError("not a digest")
    return value
