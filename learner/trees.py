"""Nested Python values with tensors in them, as plain MessagePack values plus named tensors.

State dicts of optimizers and schedulers are such trees. There is no pickle: what is not a number,
text, bytes, None, list, tuple, dict or tensor is refused by its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.parameters import local_part

_KIND = "$"
_PLAIN = (bool, float, str, bytes, type(None))


def pack(value: object, tensors: dict[str, Tensor], path: str) -> Any:
    """Replace every tensor in `value` by a reference; their values are cloned into `tensors`.

    Of a sharded tensor it is this rank's shard.

    Args:
        value: the tree.
        tensors: receives CPU clones under names that start with `path`.
        path: name of this place, `optimizer/state/0/exp_avg`.

    Raises:
        TypeError: a value of another kind, with its path.
    """
    if isinstance(value, Tensor):
        tensors[path] = local_part(value.detach()).to("cpu", copy=True).contiguous()
        return {_KIND: "tensor", "name": path}
    if isinstance(value, Mapping):
        items = [
            [pack(key, tensors, f"{path}/{key}#"), pack(item, tensors, f"{path}/{key}")]
            for key, item in value.items()
        ]
        return {_KIND: "map", "items": items}
    if isinstance(value, list | tuple):
        packed = [pack(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
        return {_KIND: "tuple", "items": packed} if isinstance(value, tuple) else packed
    if isinstance(value, int) and not isinstance(value, bool):
        # MessagePack integers end at 64 bits, Python's do not.
        return value if -(2**63) <= value < 2**64 else {_KIND: "int", "hex": hex(value)}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"{path} holds a {type(value).__name__}, which cannot be saved")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `pack` was given; KeyError or ValueError when `value` is malformed."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "tensor":
        return tensors[value["name"]].clone()
    if kind == "map":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value["items"])
    if kind == "int":
        return int(value["hex"], 16)
    raise ValueError(f"unknown kind {kind!r} in a saved tree")


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, then each state tensor in its own dtype.

    torch casts state to the parameter's dtype while loading; an optimizer that keeps f32 moments
    for bf16 parameters would lose half of their bits.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    for index, parameter in zip(order, parameters, strict=True):
        state = saved["state"].get(index, {})
        state.update({key: _sharded_like(value, parameter) for key, value in state.items()})
    optimizer.load_state_dict(saved)
    for index, parameter in zip(order, parameters, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if loaded.dtype is not value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _sharded_like(value: Any, parameter: Tensor) -> Any:
    """State that was saved as the shard of a sharded parameter, as a DTensor again."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.to_local().shape:
        return value  # a step counter
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
