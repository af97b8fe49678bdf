"""Compilation of loops."""

from __future__ import annotations

import numpy as np
import pytest

from wire.compiled import as_f32, compiled


def test_a_loop_compiles_where_nothing_can_be_cached() -> None:
    """A function without a file stands for an installation without a writable directory."""
    names: dict = {}
    exec("def divide(x, y):\n    return x / y", names)
    divide = compiled(names["divide"])
    assert divide(1.0, 2.0) == 0.5
    assert np.isinf(divide(1.0, 0.0))  # IEEE 754, no exception


def test_the_bf16_reader_is_for_compiled_loops_only() -> None:
    with pytest.raises(NotImplementedError):
        as_f32(np.uint16(1))
