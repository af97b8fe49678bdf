"""An immutable cut of the coordinator's state, as the checkpoint holds it (K1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LedgerEntry(NamedTuple):
    """Cumulative totals of one learner id (N21)."""

    merges: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment: version and two contiguous f32 CPU tensors of shape (numel,).

    The tensors are replaced, never mutated, at a commit; a snapshot may share them.
    """

    version: int
    params: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a V3 file holds (K1).

    Attributes:
        backend: iso backend id, 0 scalar, 1 torch-svd.
        fingerprint: layout fingerprint, 32 bytes.
        contract: session contract, 32 bytes.
        global_step: t of the cut.
        fragments: in layout order.
        ledger: learner id -> totals.
    """

    backend: int
    fingerprint: bytes
    contract: bytes
    global_step: int
    fragments: tuple[FragmentState, ...]
    ledger: Mapping[int, LedgerEntry]
