"""A fragment cut into blocks that stay in cache, and the threads that work on them.

The cut is a function of the tensor sizes alone, every block is computed by one thread from start to
end, and results come back in block order: so the number of threads never shows in a bit (N1, N27).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

BLOCK = 64 * 1024
"""Elements of a block: 256 KiB of f32."""

GROUP = 1024 * 1024
"""Small tensors are taken together until they have this many elements."""

Floats = NDArray[np.float32]
Result = TypeVar("Result")


class Block(NamedTuple):
    """Elements first..stop of the fragment, all of the tensor number `tensor`."""

    tensor: int
    first: int
    stop: int

    @property
    def span(self) -> slice:
        """The block's place in an array of the whole fragment."""
        return slice(self.first, self.stop)


def groups(numels: Sequence[int]) -> Iterator[list[Block]]:
    """Blocks of consecutive whole tensors, of at least `GROUP` elements where there are so many.

    What is read twice within a group is still in the shared cache the second time.
    """
    group: list[Block] = []
    at = start = 0
    for tensor, numel in enumerate(numels):
        stop = at + numel
        group += [Block(tensor, b, min(b + BLOCK, stop)) for b in range(at, stop, BLOCK)]
        at = stop
        if at - start >= GROUP:
            yield group
            group, start = [], at
    if group:
        yield group


class Workers:
    """Threads of one merge, the caller's own among them; a context manager.

    Args:
        count: how many threads work, at least 1.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count - 1, "merge") if count > 1 else None
        self._scratch = [np.empty(BLOCK, np.float32) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, work: Callable[[Block, Floats], Result], blocks: Sequence[Block]) -> list[Result]:
        """`work(block, scratch)` of every block, in block order.

        `scratch` has the block's length and belongs to the call.
        """
        results: list[Result | None] = [None] * len(blocks)
        # A list iterator hands each item to exactly one thread.
        todo = iter(list(enumerate(blocks)))

        def share(scratch: Floats) -> None:
            for index, block in todo:
                results[index] = work(block, scratch[: block.stop - block.first])

        helpers = min(self._count, len(blocks)) - 1
        running = [
            self._pool.submit(share, scratch)
            for scratch in self._scratch[1 : helpers + 1]
            if self._pool is not None
        ]
        try:
            share(self._scratch[0])
        finally:
            for future in running:
                future.result()
        return results  # type: ignore[return-value]  # every index was filled


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
