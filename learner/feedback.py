"""Error feedback: what the wire dtype rounds away rides along with the next push (L29).

Per fragment r (carried) and r' (candidate), zero at the start. A push of the delta d sends
enc(d + r) and leaves r' = (d + r) - dec(payload). When the broadcast of the round it answered is
applied, r := (1-α)·r', because the blend of L26 already keeps the share α of what the syncer did
not get. r is dropped when it has outgrown d, and when the syncer was rolled back.

The idea is that of error feedback in quantised optimisers (Seide et al. 2014, 1-bit SGD).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.buffers import Buffers
from wire.compiled import compiled
from wire.dtypes import Q4_BLOCK, DType
from wire.tensors import BF16_OVERFLOW, NonFiniteValues, decode_into, encode, representable

SLICE = 256 * Q4_BLOCK
"""Values that are encoded at once: temporaries have this size, not that of a fragment."""
_OVERFLOW = BF16_OVERFLOW.view(np.uint32)
_MAGNITUDE, _ALMOST_HALF = np.uint32(0x7FFFFFFF), np.uint32(0x7FFF)
_HALF, _ONE = np.uint32(16), np.uint32(1)


@compiled
def _narrow_difference(
    left: NDArray[np.float32], right: NDArray[np.float32], out: NDArray[np.uint16]
) -> bool:
    """bf16 of left - right (W52), in one pass; whether all stay finite."""
    largest = np.uint32(0)
    for i in range(len(out)):
        bits = np.float32(left[i] - right[i]).view(np.uint32)
        largest = max(largest, np.uint32(bits & _MAGNITUDE))
        tie = np.uint32(np.uint32(bits >> _HALF) & _ONE)
        out[i] = np.uint16(np.uint32(np.uint32(bits + _ALMOST_HALF) + tie) >> _HALF)
    return bool(largest < _OVERFLOW)


def warm_up() -> None:
    """Load the compiled loop, so that the first push does not wait for it."""
    one = np.ones(1, np.float32)
    _narrow_difference(one, one, np.empty(1, np.uint16))


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

    def __init__(
        self,
        fragments: int,
        dtype: DType,
        alpha: float,
        *,
        enabled: bool,
        buffers: Buffers | None = None,
        in_place: bool = True,
    ) -> None:
        """
        Args:
            fragments: number of fragments.
            dtype: session dtype; f32 has no error to carry.
            alpha: local share of the blend.
            enabled: False encodes plainly.
            buffers: memory for payloads and residuals.
            in_place: a residual may keep the memory of its delta, which is not pinned.
        """
        self._dtype = dtype
        self._keep = float(np.float32(1 - alpha))
        self._enabled = enabled and dtype is not DType.F32
        self._buffers = buffers or Buffers()
        self._in_place = in_place
        self._states = [_State() for _ in range(fragments)]
        self._lock = threading.Lock()

    def encode(self, fragment: int, step: int, delta: Tensor) -> memoryview:
        """The PUSH payload for `delta`, whose memory is this object's from now on.

        Args:
            fragment: whose delta.
            step: round t of the PULL.
            delta: d of L22, flat f32 CPU vector.

        Raises:
            wire.tensors.NonFiniteValues: a value the wire dtype cannot carry (L27).
        """
        if not self._enabled:
            return self._encode_plainly(delta)
        carried = self._carried(fragment)
        if carried is not None and _norm(carried) > _norm(delta):
            self._drop(fragment)
            carried = None
        residual = delta if self._in_place else self._buffers.take(len(delta))
        payload = self._room(len(delta))
        for begin in range(0, len(delta), SLICE):
            part = slice(begin, begin + SLICE)
            values = delta[part]
            if carried is not None:
                values.add_(carried[part])
            piece = self._put(payload, begin, values)
            lost = np.empty(len(values), np.float32)
            decode_into(piece, self._dtype, 0, lost)
            torch.sub(values, torch.from_numpy(lost), out=residual[part])
        with self._lock:
            self._states[fragment].candidate = _Candidate(step, residual)
        return payload.data

    @property
    def direct(self) -> bool:
        """Deltas are encoded at the boundary, as they are taken, with `encode_difference`.

        That takes half the memory of the delta, and less time. An f32 delta is its own
        payload, and what takes longer is left to a worker thread.
        """
        return self._dtype is DType.BF16 and not self._enabled

    def encode_difference(self, numel: int, terms: Iterable[tuple[Tensor, Tensor]]) -> memoryview:
        """As `encode`, for a delta of `numel` values that was never in memory.

        Args:
            numel: of the fragment.
            terms: what to subtract from each other, f32, in order.

        Raises:
            wire.tensors.NonFiniteValues: a value the wire dtype cannot carry (L27).
        """
        payload = self._room(numel)
        halves, begin = payload.view(np.uint16), 0
        for values, base in terms:
            end = begin + len(values)
            if not _narrow_difference(values.numpy(), base.numpy(), halves[begin:end]):
                raise NonFiniteValues(f"a value is not finite in {self._dtype.label}")
            begin = end
        return payload.data

    def norm(self, payload: memoryview) -> float:
        """L2 norm of what a payload of `encode_difference` says."""
        halves = torch.frombuffer(payload, dtype=torch.bfloat16)
        parts = (halves[begin : begin + SLICE] for begin in range(0, len(halves), SLICE))
        return math.hypot(*(_norm(part.float()) for part in parts))

    def _encode_plainly(self, delta: Tensor) -> memoryview:
        """The delta's memory is free for the next one as soon as this is done."""
        if self._dtype is DType.F32:
            return encode(delta, self._dtype)
        if not representable(delta, self._dtype):
            raise NonFiniteValues(f"a value is not finite in {self._dtype.label}")
        payload = self._room(len(delta))
        for begin in range(0, len(delta), SLICE):
            self._put(payload, begin, delta[begin : begin + SLICE])
        return payload.data

    def _put(self, payload: NDArray[np.uint8], begin: int, values: Tensor) -> memoryview:
        """Encode the values from number `begin` on into their place; returns their bytes."""
        piece = encode(values, self._dtype)
        start = self._dtype.size(begin)
        payload[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        return piece

    def _room(self, numel: int) -> NDArray[np.uint8]:
        """Memory for a payload."""
        return self._buffers.bytes(self._dtype.size(numel))

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
        carried.mul_(share)
        with self._lock:
            # A broadcast may have promoted a newer candidate meanwhile; its share stays.
            if state.carried is carried:
                state.share = 1.0
        return carried

    def _drop(self, fragment: int) -> None:
        with self._lock:
            self._states[fragment].carried = None


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
