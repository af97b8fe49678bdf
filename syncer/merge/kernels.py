"""Compiled loops of the merge over one block of f32 values (numerics.md N1, N3).

Sums in f64 run over `LANES` partial sums, lane i taking the elements i, i + LANES, i + 2 LANES, …;
the lanes are then added left to right. That order depends on the length alone (N3), and lets the
compiler use vector registers without re-associating anything.

What is only read, `x`, may be f32 values or bf16 bits, so that a payload need not be decoded first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wire.compiled import as_f32, compiled

LANES = 64
INFINITY = np.float32(np.inf)

Floats = NDArray[np.float32]
Readable = NDArray[np.float32] | NDArray[np.uint16]
"""f32 values, or bf16 bits."""


@compiled
def sum_of_squares(x: Readable) -> float:
    """f64 sum of x_i^2."""
    lanes = np.zeros(LANES)
    whole = len(x) // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            value = np.float64(as_f32(x[first + lane]))
            lanes[lane] += value * value
    for lane in range(len(x) - whole):
        value = np.float64(as_f32(x[whole + lane]))
        lanes[lane] += value * value
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total


@compiled
def moments(x: Readable, y: Floats) -> tuple[float, float]:
    """f64 sums of x_i^2 and of x_i * y_i."""
    squares = np.zeros(LANES)
    products = np.zeros(LANES)
    whole = len(x) // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            value = np.float64(as_f32(x[first + lane]))
            squares[lane] += value * value
            products[lane] += value * np.float64(y[first + lane])
    for lane in range(len(x) - whole):
        value = np.float64(as_f32(x[whole + lane]))
        squares[lane] += value * value
        products[lane] += value * np.float64(y[whole + lane])
    square = 0.0
    product = 0.0
    for lane in range(LANES):
        square += squares[lane]
        product += products[lane]
    return square, product


@compiled
def subtract_scaled(out: Floats, factor: np.float32, x: Readable) -> None:
    """out -= factor * x, one f32 product and one f32 difference (N7, N9)."""
    for i in range(len(out)):
        out[i] -= factor * as_f32(x[i])


@compiled
def subtract_four(
    out: Floats, factors: tuple[np.float32, ...], inputs: tuple[Readable, ...]
) -> None:
    """`subtract_scaled` of four inputs in this order: the same roundings, `out` passed once."""
    a, b, c, d = factors
    x, y, z, w = inputs
    for i in range(len(out)):
        value = out[i] - a * as_f32(x[i])
        value -= b * as_f32(y[i])
        value -= c * as_f32(z[i])
        out[i] = value - d * as_f32(w[i])


@compiled
def subtract_scaled_wide(out: Floats, factor: float, x: Readable) -> None:
    """out -= f32(factor * x), the product in f64 (N10)."""
    for i in range(len(out)):
        out[i] -= np.float32(factor * np.float64(as_f32(x[i])))


@compiled
def scale(x: Floats, factor: np.float32) -> None:
    """x *= factor."""
    for i in range(len(x)):
        x[i] *= factor


@compiled
def scale_wide(x: Floats, factor: float) -> None:
    """x = f32(factor * x), the product in f64 (N10)."""
    for i in range(len(x)):
        x[i] = np.float32(factor * np.float64(x[i]))


@compiled
def damp(out: Floats, x: Readable, momentum: Floats, factor: np.float32) -> None:
    """out = x - factor * momentum, one f32 product and one f32 difference (N15, c < 0)."""
    for i in range(len(out)):
        out[i] = as_f32(x[i]) - factor * momentum[i]


@compiled
def rotate(  # noqa: PLR0917  compiled functions take no keywords
    out: Floats, x: Readable, momentum: Floats, own: float, other: float, factor: np.float32
) -> None:
    """out = f32(own * x - other * momentum) * factor, the sum in f64 (N15, 0 <= c < c_ok)."""
    for i in range(len(out)):
        turned = own * np.float64(as_f32(x[i])) - other * np.float64(momentum[i])
        out[i] = np.float32(turned) * factor


@compiled
def outer_step(  # noqa: PLR0917  compiled functions take no keywords
    delta: Floats,
    buffer: Floats,
    params: Floats,
    new_params: Floats,
    lr: np.float32,
    mu: np.float32,
    limit: np.float32,
) -> bool:
    """Nesterov in the order of N18; `delta` becomes the new momentum.

    Returns:
        Whether the new momentum is finite and each new parameter is below `limit` (N23).
    """
    bad = False
    for i in range(len(delta)):
        new_buffer = mu * buffer[i] + delta[i]
        step = lr * (delta[i] + mu * new_buffer)
        new_param = params[i] - step
        bad |= not (abs(new_buffer) < INFINITY)
        bad |= not (abs(new_param) < limit)
        delta[i] = new_buffer
        new_params[i] = new_param
    return not bad
