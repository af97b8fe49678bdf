"""Products of a coefficient computed in f64 and f32 values (N10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncer.merge import kernels
from syncer.merge.kernels import Floats, Readable

_SAFE = 2.0**127
SMALLEST_NORMAL = np.float32(2.0**-126)


def single(value: float) -> np.float32:
    """f32(value), round to nearest even; infinite where f32 has no such number."""
    if -_SAFE < value < _SAFE:
        return np.float32(value)
    with np.errstate(over="ignore"):  # slow, and needed for what may overflow only
        return np.float32(value)


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One factor of `scale(a, x)`.

    Attributes:
        exact: a in f64.
        rounded: f32(a).
        wide: whether products are taken in f64 and rounded afterwards, because f32(a) overflows
            or is subnormal.
    """

    exact: float
    rounded: np.float32
    wide: bool

    def subtract(self, out: Floats, x: Readable) -> None:
        """out -= scale(a, x), elementwise."""
        if self.wide:
            kernels.subtract_scaled_wide(out, self.exact, x)
        else:
            kernels.subtract_scaled(out, self.rounded, x)

    def multiply(self, x: Floats) -> None:
        """x = scale(a, x), elementwise."""
        if self.wide:
            kernels.scale_wide(x, self.exact)
        else:
            kernels.scale(x, self.rounded)


def plain(value: float) -> Coefficient:
    """The f32 product whatever the size of `value` (N7)."""
    return Coefficient(value, single(value), wide=False)


def safe(value: float) -> Coefficient:
    """`scale` of N10: the f32 product where f32(value) is a normal number."""
    rounded = single(value)
    normal = bool(SMALLEST_NORMAL <= abs(rounded) < np.inf)
    return Coefficient(value, rounded, wide=not normal)


ONE = plain(1.0)
