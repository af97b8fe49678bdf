"""The bytes of a checkpoint: headers, fragment heads, ledger and trailers (K1 to K5). Pure.

Integers are little-endian. Sections of a file of revision r, in order:

    header    r = 3: magic, backend u8, fingerprint[32], step u64, F u32      49 bytes
              r = 2: magic, backend u8, step u64, F u32                       17 bytes
              r = 1: magic, step u64, F u32                                   16 bytes
    fragment  version u64, numel u64, f32 params, f32 momentum                16 + 8 numel, F times
    tail      L u32, L x (id u32, merges u64, steps u64, tokens u64), trailer
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.snapshot import LedgerEntry, Snapshot

REVISION = 3
"""The revision we write (K2)."""
MAGICS = {0xD1705A7E: 1, 0xD1705A7F: 2, 0xD1705A80: 3}
BACKEND_NAMES = ("scalar", "torch-svd")
FRAGMENT_HEAD = struct.Struct("<QQ")
LEDGER_COUNT = struct.Struct("<I")
LEDGER_DTYPE = np.dtype([("id", "<u4"), ("merges", "<u8"), ("steps", "<u8"), ("tokens", "<u8")])
HEADER_BYTES = {1: 16, 2: 17, 3: 49}
SMALLEST_HEADER = min(HEADER_BYTES.values())
LARGEST_HEADER = max(HEADER_BYTES.values())

_MAGIC_V3 = 0xD1705A80
_V1 = struct.Struct("<4xQI")
_V2 = struct.Struct("<5xQI")
_V3 = struct.Struct("<IB32sQI")
_TAG_CONTRACT = 0x52544353
_TAG_SWEEP = 0x50535750
_TAG_AND_COUNT = struct.Struct("<II")
_HASH = 32


class TrailerForm(IntEnum):
    """What follows the ledger, by its length in bytes (K4)."""

    NONE = 0
    FINGERPRINT = 32
    SWEEP_ONLY = 40
    CONTRACT = 68
    SWEEP = 72

    @property
    def label(self) -> str:
        """The name that the tools print."""
        return self.name.lower().replace("_", "-")

    @property
    def resumable(self) -> bool:
        """Whether the syncer runs files of this form; the sweep mode's are for the tools (K4)."""
        return self not in (TrailerForm.SWEEP, TrailerForm.SWEEP_ONLY)


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed prefix; `backend` and `fingerprint` are None where the revision has none (K3)."""

    revision: int
    backend: int | None
    fingerprint: bytes | None
    global_step: int
    num_fragments: int

    @property
    def size(self) -> int:
        """Bytes of the header."""
        return HEADER_BYTES[self.revision]


@dataclass(frozen=True, slots=True)
class Trailer:
    """The end of a file; fields that the form lacks are None."""

    form: TrailerForm
    fingerprint: bytes | None = None
    contract: bytes | None = None
    sweep: int | None = None


def version_at(step: int, fragment: int, fragments: int) -> int:
    """Version of `fragment` in the contiguous cut at `step` of `fragments` fragments (K5)."""
    first = fragment + 1
    return 0 if step < first else first + (step - first) // fragments * fragments


def parse_header(data: bytes) -> Header:
    """Read the header from the first bytes of a file, up to 49 of them.

    Raises:
        CheckpointRefused: `truncated`, `magic` or `backend-id`, in the order of K16.
    """
    if len(data) < SMALLEST_HEADER:
        raise CheckpointRefused(
            Reason.TRUNCATED, f"{len(data)} bytes are less than any checkpoint header"
        )
    magic = int.from_bytes(data[:4], "little")
    revision = MAGICS.get(magic)
    if revision is None:
        raise CheckpointRefused(Reason.MAGIC, f"0x{magic:08X} is not the magic of a checkpoint")
    if revision > 1 and data[4] >= len(BACKEND_NAMES):
        raise CheckpointRefused(
            Reason.BACKEND_ID, f"iso backend id {data[4]} is unknown, known are 0 and 1"
        )
    if len(data) < HEADER_BYTES[revision]:
        raise CheckpointRefused(Reason.TRUNCATED, f"the V{revision} header is cut off")
    if revision == 1:
        return Header(1, None, None, *_V1.unpack_from(data))
    if revision == 2:
        return Header(2, data[4], None, *_V2.unpack_from(data))
    _, backend, fingerprint, step, count = _V3.unpack_from(data)
    return Header(3, backend, fingerprint, step, count)


def parse_trailer(data: bytes) -> Trailer:
    """Read what follows the ledger; its length decides the form (K4).

    Raises:
        CheckpointRefused: `trailer`.
    """
    try:
        form = TrailerForm(len(data))
    except ValueError as error:
        raise CheckpointRefused(
            Reason.TRAILER,
            f"{len(data)} bytes follow the ledger, known trailers have 0, 32, 40, 68 or 72: "
            "the file is truncated or has bytes too many",
        ) from error
    if form is TrailerForm.NONE:
        return Trailer(form)
    fingerprint = data[:_HASH]
    if form is TrailerForm.FINGERPRINT:
        return Trailer(form, fingerprint)
    tag = int.from_bytes(data[32:36], "little")
    expected = _TAG_CONTRACT if form is TrailerForm.CONTRACT else _TAG_SWEEP
    if tag != expected:
        raise CheckpointRefused(
            Reason.TRAILER, f"trailer tag 0x{tag:08X} of a {len(data)}-byte trailer is unknown"
        )
    if form is TrailerForm.CONTRACT:
        return Trailer(form, fingerprint, data[36:])
    _, count = _TAG_AND_COUNT.unpack_from(data, 32)
    if count == 0:
        raise CheckpointRefused(Reason.TRAILER, "the sweep trailer counts 0 fragments")
    return Trailer(form, fingerprint, data[40:] or None, count)


def check_ledger(ledger: NDArray[np.void]) -> None:
    """Refuse duplicate ids (K6); readers take any order."""
    ids, counts = np.unique(ledger["id"], return_counts=True)
    if len(ids) != len(ledger):
        twice = int(ids[counts > 1][0])
        raise CheckpointRefused(Reason.LEDGER, f"the ledger lists learner {twice} twice")


def ledger_mapping(ledger: NDArray[np.void]) -> dict[int, LedgerEntry]:
    """The ledger by learner id."""
    return {row[0]: LedgerEntry(*row[1:]) for row in ledger.tolist()}


def encode_header(snapshot: Snapshot) -> bytes:
    """The 49-byte V3 header (K1)."""
    return _V3.pack(
        _MAGIC_V3,
        snapshot.backend,
        snapshot.fingerprint,
        snapshot.global_step,
        len(snapshot.fragments),
    )


def encode_tail(snapshot: Snapshot) -> bytes:
    """Ledger in ascending id order and the 68-byte trailer (K1, K2)."""
    if len(snapshot.fingerprint) != _HASH or len(snapshot.contract) != _HASH:
        raise ValueError("fingerprint and contract have 32 bytes each")
    return b"".join(
        (
            LEDGER_COUNT.pack(len(snapshot.ledger)),
            _ledger_rows(snapshot.ledger).tobytes(),
            snapshot.fingerprint,
            _TAG_CONTRACT.to_bytes(4, "little"),
            snapshot.contract,
        )
    )


def _ledger_rows(ledger: Mapping[int, LedgerEntry]) -> NDArray[np.void]:
    return np.array([(key, *ledger[key]) for key in sorted(ledger)], LEDGER_DTYPE)


def fragment_offsets(numels: Sequence[int]) -> list[int]:
    """Byte offset of each fragment of a V3 file, and at the end that of the tail (K1)."""
    offsets = [HEADER_BYTES[REVISION]]
    for numel in numels:
        offsets.append(offsets[-1] + FRAGMENT_HEAD.size + 8 * numel)
    return offsets
