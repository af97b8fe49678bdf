"""Checkpoints for tests: snapshots that depend on the step alone, and an encoder of every revision.

The encoder is written from K1, K3 and K4 with `struct` and shares no code with the product.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from checkpoint.codec import READ_LIMIT
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import FileSystem
from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from checkpoint.store import CheckpointStore
from wire.dtypes import DType
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec
from wire.messages import Hello

LAYOUT = NamedLayout(
    (
        NamedFragment(MergeMode.AVG, (TensorSpec("embed.weight", (2, 3)), TensorSpec("scale", ()))),
        NamedFragment(MergeMode.RDA, (TensorSpec("body.weight", (5,)),)),
        NamedFragment(MergeMode.ISO, (TensorSpec("head.weight", (2, 2)),)),
    )
)
NUMELS = tuple(fragment.numel for fragment in LAYOUT.fragments)
CONTRACT = b"\xcc" * 32
OTHER = b"\xee" * 32


def version(step: int, fragment: int, count: int) -> int:
    """The last step <= `step` of the round robin that worked on `fragment` (C10)."""
    return max((t for t in range(1, step + 1) if (t - 1) % count == fragment), default=0)


def state(fragment: int, at: int, numel: int) -> FragmentState:
    """Values that depend on fragment and version only."""
    generator = torch.Generator().manual_seed(1000 * fragment + at)
    params = torch.randn(numel, generator=generator)
    momentum = torch.randn(numel, generator=generator) if at else torch.zeros(numel)
    return FragmentState(at, params, momentum)


def cut(
    step: int,
    numels: Sequence[int] = NUMELS,
    *,
    backend: int = 0,
    fingerprint: bytes = LAYOUT.fingerprint,
    contract: bytes = CONTRACT,
) -> Snapshot:
    """The snapshot of an imaginary run at `step`; the ledger grows with the step."""
    count = len(numels)
    return Snapshot(
        backend,
        fingerprint,
        contract,
        step,
        tuple(state(p, version(step, p, count), numel) for p, numel in enumerate(numels)),
        {7 * i: LedgerEntry(step, 24 * step, 4096 * step) for i in range(min(step, 4))},
    )


def encode(
    snapshot: Snapshot,
    revision: int = 3,
    trailer: str = "contract",
    ledger: Sequence[tuple[int, int, int, int]] | None = None,
) -> bytes:
    """A whole file; `trailer` is none, fingerprint, contract, sweep or sweep-only."""
    fragments = snapshot.fragments
    head = {
        1: struct.pack("<IQI", 0xD1705A7E, snapshot.global_step, len(fragments)),
        2: struct.pack("<IBQI", 0xD1705A7F, snapshot.backend, snapshot.global_step, len(fragments)),
        3: struct.pack("<IB", 0xD1705A80, snapshot.backend)
        + snapshot.fingerprint
        + struct.pack("<QI", snapshot.global_step, len(fragments)),
    }[revision]
    body = b"".join(
        struct.pack("<QQ", item.version, item.params.numel())
        + b"".join(
            struct.pack(f"<{half.numel()}f", *half.tolist())
            for half in (item.params, item.momentum)
        )
        for item in fragments
    )
    rows = _rows(snapshot.ledger) if ledger is None else ledger
    table = struct.pack("<I", len(rows)) + b"".join(struct.pack("<IQQQ", *row) for row in rows)
    end = {
        "none": b"",
        "fingerprint": snapshot.fingerprint,
        "contract": snapshot.fingerprint + b"SCTR" + snapshot.contract,
        "sweep": snapshot.fingerprint + b"PWSP" + struct.pack("<I", 2) + snapshot.contract,
        "sweep-only": snapshot.fingerprint + b"PWSP" + struct.pack("<I", 2),
    }[trailer]
    return head + body + table + end


def _rows(ledger: Mapping[int, LedgerEntry]) -> list[tuple[int, int, int, int]]:
    return [(key, *ledger[key]) for key in sorted(ledger)]


def hello(
    layout: NamedLayout = LAYOUT,
    *,
    fingerprint: bytes | None = None,
    contract: bytes = CONTRACT,
) -> Hello:
    """A HELLO of learner 0 with `layout`."""
    return Hello(
        learner_id=0,
        generation=1,
        dtype=DType.F32,
        layout=layout.numeric,
        fingerprint=layout.fingerprint if fingerprint is None else fingerprint,
        contract=contract,
        profile=None,
        num_streams=0,
    )


def flat_layout(numels: Sequence[int]) -> NamedLayout:
    """One tensor a fragment."""
    return NamedLayout(
        tuple(
            NamedFragment(MergeMode.AVG, (TensorSpec(f"t{i}", (numel,)),))
            for i, numel in enumerate(numels)
        )
    )


class MemorySource:
    """A file in memory that refuses to be read beyond its size, and counts what was asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.longest = 0

    def read_into(self, offset: int, out: memoryview) -> None:
        assert offset >= 0
        self.longest = max(self.longest, len(out))
        assert len(out) <= max(READ_LIMIT, self.size)
        if offset + len(out) > self.size:
            raise CheckpointRefused(Reason.TRUNCATED, "past the end")
        out[:] = self._data[offset : offset + len(out)]


def started(
    path: Path, files: FileSystem | None = None, *, resume: bool = False
) -> CheckpointStore:
    """A store that went through the start of a run (C4)."""
    store = CheckpointStore(path, files)
    store.acquire()
    store.check_presence(resume)
    if resume:
        store.load(0, None)
    store.clean_leftovers()
    return store


def same_bits(first: Snapshot, second: Snapshot) -> bool:
    """Whether two snapshots would be the same file."""
    return encode(first) == encode(second)
