"""numerics.md written down a second time, in numpy, as directly as possible.

Sums run strictly left to right (N3), every f32 operation is one numpy operation on f32 arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

F = np.float32


def total(values: Sequence[float]) -> float:
    out = 0.0
    for value in values:
        out = out + value
    return out


def dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.cumsum(a.astype(np.float64) * b.astype(np.float64))[-1])


def norm(a: np.ndarray) -> float:
    return math.sqrt(dot(a, a))


def scale(a: float, x: np.ndarray) -> np.ndarray:
    """N10."""
    with np.errstate(all="ignore"):
        c = F(a)
        if np.isfinite(c) and abs(c) >= 2.0**-126:
            return c * x
        return (a * x.astype(np.float64)).astype(F)


def avg(grads: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """N6, N7."""
    out = np.zeros_like(grads[0])
    w_sum = total(weights)
    if w_sum == 0:
        return out
    for g, w in zip(grads, weights, strict=True):
        out = out + F(w / w_sum) * g
    return out


def direction(grads: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """N9."""
    out = np.zeros_like(grads[0])
    w_sum = total(weights)
    for g, w in zip(grads, weights, strict=True):
        n = norm(g)
        if n != 0:
            out = out + scale((w / w_sum) / n, g)
    return out


def rda(grads: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """N8 to N11."""
    w_sum = total(weights)
    if w_sum == 0:
        return np.zeros_like(grads[0])
    r = total([norm(g) * w for g, w in zip(grads, weights, strict=True)]) / w_sum
    out = direction(grads, weights)
    d = norm(out)
    return avg(grads, weights) if d < 1e-12 else scale(r / d, out)


def cosine(g: np.ndarray, m: np.ndarray) -> float:
    return dot(g, m) / (norm(g) * norm(m))


def heloco(g: np.ndarray, m: np.ndarray) -> np.ndarray:
    """N15, N16."""
    nd, nm = norm(g), norm(m)
    if nd < 1e-8 or nm < 1e-8:
        return g
    c = dot(g, m) / (nd * nm)
    if c >= 0.2:
        return g
    conf = nd / (nd + 3.0 * nm + 1e-8)
    if c < 0:
        beta = min(0.5 * (-c) * conf, 0.5)
        with np.errstate(over="ignore"):
            return g + F(-beta * c * nd / nm) * m
    lam = min(1.0 * (1 - c) * conf, 1)
    t = ((1 - lam) / nd) * g.astype(np.float64) + (lam / nm) * m.astype(np.float64)
    length = math.sqrt(np.cumsum(t * t)[-1])
    return t.astype(F) * F(nd / max(length, 1e-8))


def iso(a: np.ndarray, rows: int, cols: int, cutoff: float | None = None) -> np.ndarray:
    """N12, N13, of an average."""
    if not a.any():
        return a
    u, s, vt = np.linalg.svd(a.astype(np.float64).reshape(rows, cols), full_matrices=False)
    limit = (max(rows, cols) * 2.0**-23 if cutoff is None else cutoff) * s[0]
    kept = s > limit
    return (s.mean() * u[:, kept] @ vt[kept]).astype(F).reshape(-1)


def nesterov(
    p: np.ndarray, buf: np.ndarray, delta: np.ndarray, lr: float, mu: float
) -> tuple[np.ndarray, np.ndarray]:
    """N18."""
    t1 = F(mu) * buf
    buf2 = t1 + delta
    t2 = F(mu) * buf2
    t3 = delta + t2
    t4 = F(lr) * t3
    return p - t4, buf2
