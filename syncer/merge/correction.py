"""Directional correction of one gradient against the momentum (numerics.md section 6).

A gradient that disagrees with the momentum is turned towards it: the more, the larger the
disagreement, and the less, the larger the momentum is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from syncer.merge import kernels
from syncer.merge.kernels import Floats, Readable
from syncer.merge.scaling import single

COSINE_OK = 0.2
STRENGTH = 0.5
DIRECTION = 1.0
BETA_MAX = 0.5
KAPPA = 3.0
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Damp:
    """c < 0: g + factor * m, in f32."""

    factor: np.float32

    def apply(self, out: Floats, delta: Readable, momentum: Floats) -> None:
        """Write a corrected learner delta, -g, to `out`, which may be `delta`."""
        kernels.damp(out, delta, momentum, self.factor)


@dataclass(frozen=True, slots=True)
class Rotate:
    """0 <= c < c_ok: f32(own * g + other * m) * factor."""

    own: float
    other: float
    factor: np.float32

    def apply(self, out: Floats, delta: Readable, momentum: Floats) -> None:
        """Write a corrected learner delta, -g, to `out`, which may be `delta`."""
        kernels.rotate(out, delta, momentum, self.own, self.other, self.factor)


def correction(gradient: float, momentum: float, dot: float) -> Damp | Rotate | None:
    """What to do with a gradient slice, None for nothing (N15, N16).

    Args:
        gradient: nd, f64 norm of g.
        momentum: nm, f64 norm of the momentum slice m.
        dot: <g, m> in f64.

    The norm of t in the rotation is taken from the law of cosines: its two parts have the lengths
    1 - lambda and lambda, and the angle between them is known. All terms are positive, so this
    equals the summed norm to a few units of f64 (N26 allows 1e-12) and saves a pass.
    """
    if gradient < EPSILON or momentum < EPSILON:
        return None
    cosine = dot / (gradient * momentum)
    if cosine >= COSINE_OK:
        return None
    confidence = gradient / (gradient + KAPPA * momentum + EPSILON)
    if cosine < 0:
        beta = min(STRENGTH * -cosine * confidence, BETA_MAX)
        return Damp(single(-beta * cosine * gradient / momentum))
    share = min(DIRECTION * (1 - cosine) * confidence, 1.0)
    own = 1 - share
    length = sqrt(own * own + share * share + 2 * own * share * cosine)
    return Rotate(own / gradient, share / momentum, single(gradient / max(length, EPSILON)))
