"""How loops over tensor values are compiled (numba).

Without fastmath numba keeps every f32 operation single-rounded and in the order written, and never
contracts a product and a sum into a fused multiply-add (N1). Compiled loops release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile on first use and keep the machine code beside the source or in the user's cache.

    Division by zero follows IEEE 754 instead of raising.
    """
    try:
        return cast(Function, njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # neither place can be written: compile in each process
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
