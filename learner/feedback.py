"""Error feedback: what the wire dtype rounds away rides along with the next push (L29).

Per fragment r (carried) and r' (candidate), zero at the start. A push of the delta d sends
enc(d + r) and leaves r' = (d + r) - dec(payload). When the broadcast of the round it answered is
applied, r := (1-α)·r', because the blend of L26 already keeps the share α of what the syncer did
not get. r is dropped when it has outgrown d, and when the syncer was rolled back.

The idea is that of error feedback in quantised optimisers (Seide et al. 2014, 1-bit SGD).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wire.dtypes import DType
from wire.tensors import decode, encode


@dataclass(slots=True)
class _Candidate:
    """r' of the newest push, the round it answered, and whether it has left."""

    step: int
    values: Tensor
    sent: bool = False


@dataclass(slots=True)
class _State:
    carried: Tensor | None = None
    share: float = 1.0
    """Factor of `carried` not multiplied in yet: that is left to the encoding thread."""
    candidate: _Candidate | None = None


class Feedback:
    """Encodes deltas and remembers their rounding errors.

    `encode` may run in another thread than the rest; one call at a time per fragment.
    """

    def __init__(self, fragments: int, dtype: DType, alpha: float, *, enabled: bool) -> None:
        """
        Args:
            fragments: number of fragments.
            dtype: session dtype; f32 has no error to carry.
            alpha: local share of the blend.
            enabled: False encodes plainly.
        """
        self._dtype = dtype
        self._keep = float(np.float32(1 - alpha))
        self._enabled = enabled and dtype is not DType.F32
        self._states = [_State() for _ in range(fragments)]
        self._lock = threading.Lock()

    def encode(self, fragment: int, step: int, delta: Tensor) -> memoryview:
        """The PUSH payload for `delta`, in memory of its own; `delta` is overwritten.

        Args:
            fragment: whose delta.
            step: round t of the PULL.
            delta: d of L22, flat f32 CPU vector.

        Raises:
            wire.tensors.NonFiniteValues: a value the wire dtype cannot carry (L27).
        """
        if not self._enabled:
            # An f32 payload is a view of its tensor, and the delta's buffer is the caller's.
            return encode(delta.clone() if self._dtype is DType.F32 else delta, self._dtype)
        carried = self._carried(fragment)
        if carried is not None:
            if _norm(carried) > _norm(delta):
                self._drop(fragment)
            else:
                delta.add_(carried)
        payload = encode(delta, self._dtype)
        lost = decode(payload, self._dtype, delta.numel())
        torch.sub(delta, lost, out=lost)
        with self._lock:
            self._states[fragment].candidate = _Candidate(step, lost)
        return payload

    def sent(self, fragment: int, step: int) -> None:
        """The push for round `step` has left; one that never left leaves r as it was (L12)."""
        with self._lock:
            candidate = self._states[fragment].candidate
            if candidate is not None and candidate.step == step:
                candidate.sent = True

    def applied(self, fragment: int, version: int) -> None:
        """The broadcast of round `version` was applied."""
        with self._lock:
            state = self._states[fragment]
            candidate = state.candidate
            if candidate is not None and candidate.sent and candidate.step == version:
                state.carried, state.share = candidate.values, self._keep
                state.candidate = None

    def reset(self) -> None:
        """Forget everything: the syncer was rolled back."""
        with self._lock:
            self._states = [_State() for _ in self._states]

    def carried_norm(self, fragment: int) -> float:
        """L2 norm of r, for reports."""
        carried = self._carried(fragment)
        return 0.0 if carried is None else _norm(carried)

    def _carried(self, fragment: int) -> Tensor | None:
        with self._lock:
            state = self._states[fragment]
            carried, share = state.carried, state.share
        if carried is None or share == 1.0:
            return carried
        scaled = carried * share
        with self._lock:
            # A broadcast may have promoted a newer candidate meanwhile; that one stays.
            if state.carried is carried:
                state.carried, state.share = scaled, 1.0
        return scaled

    def _drop(self, fragment: int) -> None:
        with self._lock:
            self._states[fragment].carried = None


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
