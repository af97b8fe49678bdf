"""Identities that a HELLO carries beside the layout fingerprint (W21-W23)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_CONTRACT_PREFIX = b"yeto-session-contract-v1\0"
_PROFILE_PREFIX = b"yeto-syncer-semantic-profile-v1\0"
_PROFILE_EXTENSION = b"yeto-profile-ext-v1\0"
_PROFILE_HEAD = struct.Struct("<IIQddIQdBQQQ")
HASH_BYTES = 32


def session_contract_hash(fingerprint: bytes, run_id: str | None) -> bytes:
    """The identity of one experiment, 32 bytes (W21); without a run id, the fingerprint itself."""
    if run_id is None:
        return fingerprint
    text = run_id.encode()
    length = struct.pack("<I", len(text))
    return hashlib.sha256(_CONTRACT_PREFIX + fingerprint + length + text).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerProfile:
    """The merge, schedule and recovery configuration that `profile` hashes stand for (W22, W23).

    Durations ending in `_ms` and `_s` are whole milliseconds and seconds; `total_steps` 0 is none.
    `outer_lr_by_fragment`, `iso_rank_cutoff` and a backend other than 0 extend the hash (W23).
    """

    learners: int
    quorum: int
    grace_ms: int
    grace_gamma: float
    grace_tau: float
    pipeline: int
    min_round_interval_ms: int
    sync_interval_steps: float
    heloco: bool
    quorum_timeout_s: int
    final_ack_timeout_s: int
    total_steps: int
    outer_lr: float
    outer_momentum: float
    checkpoint_every: int
    resume: bool
    mark_final_checkpoint: bool
    learner_budget_steps: int | None
    max_base_lag: int | None
    equal_weights: bool
    require_profile_binding: bool
    checkpoint_enabled: bool = True
    outer_lr_by_fragment: Sequence[float] | None = None
    iso_rank_cutoff: float | None = None
    iso_backend: int = 0

    def canonical(self) -> bytes:
        """The bytes that are hashed, fields 1 to 24 of W22 and the extension of W23."""
        head = _PROFILE_HEAD.pack(
            self.learners,
            self.quorum,
            self.grace_ms,
            self.grace_gamma,
            self.grace_tau,
            self.pipeline,
            self.min_round_interval_ms,
            self.sync_interval_steps,
            self.heloco,
            self.quorum_timeout_s,
            self.final_ack_timeout_s,
            self.total_steps,
        )
        parts = [
            _PROFILE_PREFIX,
            head,
            b"\0",  # policy_sweep_fragments: a mode that is not part of this program
            struct.pack("<ff", self.outer_lr, self.outer_momentum),
            struct.pack("<BQ", self.checkpoint_enabled, self.checkpoint_every),
            struct.pack("<BB", self.resume, self.mark_final_checkpoint),
            _optional_u64(self.learner_budget_steps),
            _optional_u64(self.max_base_lag),
            struct.pack("<BB", self.equal_weights, self.require_profile_binding),
        ]
        return b"".join(parts) + self._extension()

    def _extension(self) -> bytes:
        entries: list[tuple[int, bytes]] = []
        if self.outer_lr_by_fragment is not None:
            rates = self.outer_lr_by_fragment
            entries.append((1, struct.pack(f"<{len(rates)}f", *rates)))
        if self.iso_rank_cutoff is not None:
            entries.append((2, struct.pack("<d", self.iso_rank_cutoff)))
        if self.iso_backend != 0:
            entries.append((3, struct.pack("<B", self.iso_backend)))
        if not entries:
            return b""
        fields = (struct.pack("<BI", tag, len(value)) + value for tag, value in entries)
        return _PROFILE_EXTENSION + b"".join(fields)

    def digest(self) -> bytes:
        """syncer_profile_hash, 32 bytes (W22)."""
        return hashlib.sha256(self.canonical()).digest()


def _optional_u64(value: int | None) -> bytes:
    return b"\0" if value is None else b"\1" + struct.pack("<Q", value)
