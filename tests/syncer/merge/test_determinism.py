"""Equal inputs give equal bits, whatever the threads; memory stays within its bound (N27, N3)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from syncer.merge import blocks
from syncer.merge.blocks import Block, Workers, groups
from syncer.merge.engine import merge_round
from syncer.merge.plan import MergeJob, Response
from syncer.svd.scalar import ScalarSvd
from tests.syncer.merge.rounds import bits, make_job, run
from wire.dtypes import DType
from wire.layout import MergeMode

NUMELS = [blocks.BLOCK + 3, blocks.GROUP, 1, 77, 5 * blocks.BLOCK]


def big_job(mode: MergeMode, dtype: DType, heloco: bool) -> MergeJob:
    generator = np.random.default_rng(8)
    numel = sum(NUMELS)
    momentum = generator.standard_normal(numel).astype(np.float32)
    common = generator.standard_normal(numel)
    grads = [
        (generator.standard_normal(numel) + sign * momentum + common).astype(np.float32)
        for sign in (-1, 0.1, 1)
    ]
    shapes = [(1, n) for n in NUMELS] if mode is MergeMode.ISO else None
    return make_job(
        grads,
        mode=mode,
        dtype=dtype,
        numels=NUMELS,
        weights=[1, 10**6, 3],
        momentum=momentum,
        heloco=heloco,
        lr=0.7,
        mu=0.9,
        shapes=shapes,
    )


def same(a, b) -> bool:
    return (
        torch.equal(a.params, b.params)
        and torch.equal(a.momentum, b.momentum)
        and a.gnorm == b.gnorm
        and a.weights == b.weights
    )


@pytest.mark.parametrize("heloco", [False, True])
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("mode", [MergeMode.AVG, MergeMode.RDA])
def test_the_number_of_threads_does_not_show(mode: MergeMode, dtype: DType, heloco: bool) -> None:
    job = big_job(mode, dtype, heloco)
    alone = run(job, threads=1)
    for threads in (2, 3, 7, None):
        assert same(run(job, threads), alone)


def test_the_number_of_threads_does_not_show_in_iso() -> None:
    job = big_job(MergeMode.ISO, DType.BF16, True)
    assert same(run(job, threads=3), run(job, threads=1))


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("offset", [1, 2, 50])
def test_the_address_and_kind_of_a_payload_do_not_show(dtype: DType, offset: int) -> None:
    """Payloads are slices of received messages, at any alignment, writable or not."""
    job = big_job(MergeMode.RDA, dtype, True)
    moved = []
    for r in job.responses:
        message = bytearray(offset) + r.payload
        moved.append(
            Response(r.member, memoryview(message)[offset:].toreadonly(), r.c_tokens, r.c_steps)
        )
    other = MergeJob(job.fragment, dtype, tuple(moved), job.params, job.momentum, job.settings)
    assert same(run(other), run(job))


def test_a_tensor_alone_or_in_a_fragment_gives_equal_bits() -> None:
    """N3: the order of a reduction depends on the tensor's length alone."""
    generator = np.random.default_rng(1)
    part = [generator.standard_normal(NUMELS[0]).astype(np.float32) for _ in range(2)]
    head = [generator.standard_normal(1001).astype(np.float32) for _ in range(2)]
    alone = run(make_job(part, mode=MergeMode.RDA))
    together = run(
        make_job(
            [np.concatenate(p) for p in zip(head, part, strict=True)],
            mode=MergeMode.RDA,
            numels=[1001, NUMELS[0]],
        )
    )
    assert bits(together.momentum[1001:]) == bits(alone.momentum)


def test_memory_stays_near_the_two_new_fragments() -> None:
    """The bound is (K + 2) fragments and 64 MiB; a merge keeps no decoded payload."""
    job = big_job(MergeMode.RDA, DType.BF16, True)
    run(job)
    tracemalloc.start()
    result = merge_round(job, ScalarSvd(), threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 4 * len(result.params) + 2 * 2**20


def test_groups_hold_every_element_once_and_whole_tensors() -> None:
    found = list(groups(NUMELS))
    assert len(found) == 2
    flat = [block for group in found for block in group]
    at = 0
    for block in flat:
        assert block.first == at
        assert 0 < block.stop - block.first <= blocks.BLOCK
        at = block.stop
    assert at == sum(NUMELS)
    edges = np.cumsum(NUMELS)
    for group in found:
        assert group[-1].stop in edges
    assert [b.tensor for b in flat] == [int(np.searchsorted(edges, b.first, "right")) for b in flat]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_workers_return_results_in_block_order(count: int) -> None:
    todo = [Block(0, i, i + 1) for i in range(40)]
    with Workers(count) as workers:
        assert workers.run(lambda block, scratch: (block.first, len(scratch)), todo) == [
            (i, 1) for i in range(40)
        ]
        assert workers.run(lambda block, _: block, []) == []


@pytest.mark.parametrize("count", [1, 3])
def test_workers_pass_on_an_error(count: int) -> None:
    def work(block: Block, _: object) -> None:
        if block.first == 17:
            raise KeyError(block.first)

    with Workers(count) as workers, pytest.raises(KeyError):
        workers.run(work, [Block(0, i, i + 1) for i in range(40)])
