"""What is made once, before the first step: HELLO, INIT, and the loading of compiled loops."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from learner import feedback
from learner.buffers import Buffers
from learner.config import LearnerConfig
from learner.errors import NonFiniteParameters
from learner.parameters import Parameters
from wire.dtypes import DType
from wire.layout import NamedLayout
from wire.messages import Hello
from wire.tensors import NonFiniteValues, decode, encode

_BF16_LIMIT = 3.3961775e38
"""Magnitudes from here on round to infinity in bf16 (W52)."""


def build_hello(config: LearnerConfig, layout: NamedLayout, contract: bytes) -> Hello:
    """Our HELLO without a generation, which each dial draws anew (W3)."""
    return Hello(
        learner_id=config.learner_id,
        generation=0,
        dtype=config.dtype,
        layout=layout.numeric,
        fingerprint=layout.fingerprint,
        contract=contract,
        profile=config.profile_hash,
        num_streams=config.streams,
    )


def encode_init(parameters: Parameters, dtype: DType) -> list[memoryview]:
    """INIT tensors of every fragment, in memory of their own (L14).

    Args:
        parameters: before the first local step.
        dtype: session dtype.

    Raises:
        NonFiniteParameters: names the tensor.
    """
    encoded: list[memoryview] = []
    for fragment in range(len(parameters)):
        values = parameters.snapshot(fragment)
        try:
            payload = encode(values, dtype.bulk)
        except NonFiniteValues as error:
            text = describe_bad(parameters, fragment, values, dtype.bulk)
            raise NonFiniteParameters(text) from error
        # In mappings of their own, which the system gets back once a broadcast has come.
        room = Buffers().bytes(len(payload))
        room[:] = np.frombuffer(payload, np.uint8)
        encoded.append(room.data)
    return encoded


def describe_bad(parameters: Parameters, fragment: int, values: Tensor, dtype: DType) -> str:
    """Which tensor of `values` the wire dtype cannot carry (L27)."""
    limit = _BF16_LIMIT if dtype is DType.BF16 else float("inf")
    name = parameters.first_bad(fragment, values, limit)
    return (
        f"tensor {name!r} of fragment {fragment} has a value that is not finite in "
        f"{dtype.label}; nothing was sent"
    )


def warm_up(parameters: Parameters, dtype: DType) -> None:
    """Compiled loops are loaded on first use, which no step shall pay for."""
    parameters.warm_up()
    feedback.warm_up()
    for used in {dtype, dtype.bulk, DType.F32}:
        decode(encode(torch.zeros(1), used), used, 1)
