"""Memory of retired results is used again, and never while somebody still refers to it."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.merge.engine import merge_round
from syncer.merge.memory import KEPT, ResultMemory
from syncer.svd.scalar import ScalarSvd
from tests.syncer.merge.rounds import make_job
from wire.memory import MAPPED_FROM

MAPPED = MAPPED_FROM // 4
"""f32 values from which on memory is recycled."""


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_comes_back_when_the_last_view_of_it_is_gone() -> None:
    memory = ResultMemory()
    first = memory.take(MAPPED)
    place = address(first)
    tensor = torch.from_numpy(first)[10:20]
    del first
    gc.collect()
    assert address(memory.take(MAPPED)) != place  # the tensor still refers to it
    del tensor
    gc.collect()
    places = {address(array) for array in [memory.take(MAPPED) for _ in range(KEPT)]}
    assert place in places


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 2**32))
@settings(max_examples=50)
def test_no_two_living_arrays_share_memory(deaths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    memory = ResultMemory()
    living: list[tuple[np.ndarray, float]] = []
    for number, death in enumerate(deaths):
        array = memory.take(MAPPED + rng.randrange(3) * MAPPED)
        array.fill(number)
        living.append((array, float(number)))
        if death < len(living):
            living.pop(death)
        del array
        for alive, value in living:
            assert alive[0] == alive[-1] == value


def test_recycled_memory_never_shows_in_a_result() -> None:
    """N1: the same bits whatever the memory held before, and old results stay as they were."""
    rng = np.random.default_rng(3)
    grads = [rng.standard_normal(2 * MAPPED, np.float32) for _ in range(2)]
    job = make_job(grads, lr=0.7, mu=0.9)
    memory = ResultMemory()
    kept = []
    for turn in range(2 * KEPT):
        fresh = merge_round(job, ScalarSvd())
        result = merge_round(job, ScalarSvd(), memory=memory)
        assert torch.equal(result.params, fresh.params)
        assert torch.equal(result.momentum, fresh.momentum)
        if turn % 3 == 0:
            kept.append((result.params, fresh.params))
        job = replace(job, params=result.params, momentum=result.momentum)
    for ours, expected in kept:
        assert torch.equal(ours, expected)
