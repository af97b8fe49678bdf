"""The marker `P.final` that declares a checkpoint final (K20, K21), and `--final-state` (K23)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from checkpoint.codec import tensor_bytes
from checkpoint.files import Buffer, FileSystem, open_to_read, write_atomically
from checkpoint.snapshot import Snapshot

MARKER_LIMIT = 4096
"""Bytes of the longest marker that is read; ours have at most 49."""

_MARKER = re.compile(rb"YETO_FINAL_V1\nglobal_step=([0-9]+)\n")


def encode_marker(step: int) -> bytes:
    """The exact content of the marker of `step` (K20)."""
    return b"YETO_FINAL_V1\nglobal_step=%d\n" % step


def parse_marker(data: bytes) -> int | None:
    """The step that a marker states, None where it is malformed (K21)."""
    match = _MARKER.fullmatch(data)
    if match is None or len(data) > MARKER_LIMIT:
        return None
    step = int(match[1])
    return step if step < 2**64 else None


def read_marker(path: Path) -> int | None:
    """The step that the marker file states, None where it is missing or malformed."""
    try:
        with open(open_to_read(path), "rb") as file:
            return parse_marker(file.read(MARKER_LIMIT + 1))
    except OSError:
        return None


def write_final_state(path: Path, snapshot: Snapshot, files: FileSystem | None = None) -> None:
    """Write `--final-state` durably: u32 F, per fragment u64 numel and f32 params (K23).

    Blocks until the directory is synced. Raises OSError; the file at `path` is then intact.
    """
    temporary = path.with_name(path.name + ".tmp")
    write_atomically(files or FileSystem(), path, temporary, _final_state(snapshot))


def _final_state(snapshot: Snapshot) -> Iterator[Buffer]:
    yield struct.pack("<I", len(snapshot.fragments))
    for fragment in snapshot.fragments:
        yield struct.pack("<Q", fragment.params.numel())
        yield tensor_bytes(fragment.params)
