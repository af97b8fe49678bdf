"""Text as bytes: what is read, what is held out, and which part belongs to which learner.

The text is cut into blocks. Every 20th block is held out; the rest is dealt to 8 shards, and a
learner trains on shard `learner id mod 8`. The number of learners need not be known: learners
that meet on a shard still read it in different orders.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .base import TaskError

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 65536
HOLD_OUT_EVERY = 20
SHARDS = 8

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def read_text(data: Path | None) -> Bytes:
    """All bytes of a file, of a folder's files, or (None) of the standard library's sources.

    Files follow each other sorted by their path below the folder, so that every machine with the
    same files has the same text. Files that cannot be read are skipped.
    """
    if data is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        return _joined([path for path in _files(folder, "*.py") if _is_library(path, folder)])
    if data.is_dir():
        return _joined(_files(data, "*"))
    try:
        return np.frombuffer(data.read_bytes(), np.uint8)
    except OSError as error:
        raise TaskError(f"cannot read the text of --data {data}: {error.strerror}") from error


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        (path for path in folder.rglob(pattern) if path.is_file()),
        key=lambda path: path.relative_to(folder).as_posix(),
    )


def _is_library(path: Path, folder: Path) -> bool:
    """Leaves out what differs from machine to machine: installed packages, and the library's
    own tests, which some distributions do not ship."""
    return not _NOT_LIBRARY & set(path.relative_to(folder).parts)


def _joined(paths: list[Path]) -> Bytes:
    parts = []
    for path in paths:
        try:
            parts.append(path.read_bytes())
        except OSError:
            continue
    return np.frombuffer(b"".join(parts), np.uint8)


@dataclass(frozen=True)
class Spans:
    """Stretches of the text in which windows may lie: their starts and lengths, in bytes."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def offsets(self, window: int) -> int:
        """How many windows of this many bytes there are."""
        return int(np.maximum(self.lengths - window + 1, 0).sum())

    def locate(self, indices: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
        """Start byte of the i-th window, for i in [0, offsets(window))."""
        ends = np.cumsum(np.maximum(self.lengths - window + 1, 0))
        span = np.searchsorted(ends, indices, side="right")
        before = np.where(span > 0, ends[span - 1], 0)
        return np.asarray(self.starts[span] + indices - before, np.int64)


class Corpus:
    """One learner's view of the text.

    Windows are int64 arrays of shape (count, seq_len + 1): inputs and, one further, targets.
    """

    def __init__(self, text: Bytes, *, seq_len: int, seed: int, learner_id: int) -> None:
        self._text = text
        self._window = seq_len + 1
        self._seed = seed
        self._learner_id = learner_id
        block = max(1, min(BLOCK_BYTES, len(text) // HOLD_OUT_EVERY))
        blocks = np.arange(0, len(text), block, dtype=np.int64)
        held_out = np.arange(len(blocks)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
        training = blocks[~held_out]
        own = training[learner_id % SHARDS :: SHARDS]
        self._held_out = self._spans(blocks[held_out], block)
        self._own = self._spans(own, block)
        for name, spans in (("held-out part", self._held_out), ("shard", self._own)):
            if spans.offsets(self._window) == 0:
                raise TaskError(
                    f"the text is too short: {len(text)} bytes leave no window of --seq-len "
                    f"{seq_len} + 1 bytes in the {name} of learner {learner_id}; give --data more "
                    f"text (about {self._window * HOLD_OUT_EVERY} bytes) or a smaller --seq-len"
                )

    def _spans(self, starts: npt.NDArray[np.int64], block: int) -> Spans:
        return Spans(starts, np.minimum(block, len(self._text) - starts))

    def batch(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """The windows of the batch number `position`; a pure function of seed, id, position."""
        rng = np.random.default_rng([self._seed, self._learner_id, position])
        indices = rng.integers(0, self._own.offsets(self._window), size=count)
        return self._windows(self._own.locate(indices, self._window))

    def held_out(self, count: int) -> npt.NDArray[np.int64]:
        """`count` windows spread evenly over the held-out part; the same for every learner."""
        total = self._held_out.offsets(self._window)
        indices = np.arange(count, dtype=np.int64) * total // count
        return self._windows(self._held_out.locate(indices, self._window))

    def _windows(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        windows = self._text[starts[:, None] + np.arange(self._window)]
        return np.asarray(windows, np.int64)
