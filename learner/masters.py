"""f32 master copies of bf16 and f16 parameters, where the optimizer keeps them.

Such an optimizer computes in f32 and writes the rounded result into the parameter. What a learner
did lies in the master, and a broadcast written only into the parameter would be overwritten by the
next step. So deltas are taken from the master, and broadcasts go into both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.errors import LayoutError

Masters = Callable[[nn.Parameter], Tensor | None]
"""The f32 master of a parameter, in its shape, or None while it has none."""

NAMES = ("master_param", "master_weight", "master_weights", "fp32_param")
"""Keys of `optimizer.state[parameter]` under which a master is found by itself."""

ROUNDED = (torch.bfloat16, torch.float16)


def no_masters(parameter: nn.Parameter) -> None:
    """For optimizers that work on the parameters themselves."""
    del parameter


def masters_in(optimizer: torch.optim.Optimizer) -> Masters:
    """Looks into the state of `optimizer`, anew each time: it is made at the first step."""

    def find(parameter: nn.Parameter) -> Tensor | None:
        state = optimizer.state.get(parameter)
        if not state:
            return None
        found = (state.get(name) for name in NAMES)
        return next((value for value in found if _fits(value, parameter)), None)

    return find


def source_of(name: str, parameter: nn.Parameter, masters: Masters) -> Tensor:
    """The tensor that holds what was trained: the master if there is one, else the parameter.

    Raises:
        LayoutError: what `masters` returned is no f32 tensor of the parameter's shape.
    """
    if parameter.dtype not in ROUNDED:
        return parameter
    master = masters(parameter)
    if master is None:
        return parameter
    if not _fits(master, parameter):
        raise LayoutError(
            f"the master of parameter {name!r} is {master.dtype} of shape {tuple(master.shape)}, "
            f"not float32 of shape {tuple(parameter.shape)}"
        )
    return master.detach()


def _fits(value: object, parameter: nn.Parameter) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype is torch.float32
        and value.shape == parameter.shape
        and isinstance(value, DTensor) == isinstance(parameter, DTensor)
    )
