"""States of the random generators of a process, as plain bytes (L50)."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """States of torch (CPU and every CUDA device), Python and numpy, as bytes (L50)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _bytes(torch.get_rng_state()),
        "cuda": [_bytes(state) for state in torch.cuda.get_rng_state_all()],
        "python": [version, struct.pack(f"<{len(words)}I", *words), gauss],
        "numpy": [kind, np.asarray(keys).astype("<u4").tobytes(), position, has_gauss, cached],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every generator as `rng_state` found it; CUDA only where the devices are the same."""
    torch.set_rng_state(_tensor(state["torch"]))
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(data) for data in state["cuda"]])
    version, words, gauss = state["python"]
    random.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, "<u4"), position, has_gauss, cached))


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
