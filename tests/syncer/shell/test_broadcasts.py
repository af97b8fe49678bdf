"""Broadcasts leave in the order in which they were to be sent, however long each takes to encode."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch

from syncer.broadcasts import INLINE_NUMEL, Broadcasts
from syncer.links import Link
from wire.dtypes import DType
from wire.messages import Broadcast

LARGE = torch.ones(INLINE_NUMEL + 1)
SMALL = torch.ones(3)


class Reader:
    """What a link gets."""

    def __init__(self) -> None:
        self.wanted: dict[int, int] = {}
        self.got: list[tuple[int, int]] = []

    def broadcast(self, message: Broadcast) -> None:
        self.got.append((message.fragment, message.version))


async def test_c9_a_short_fragment_does_not_overtake_a_long_one() -> None:
    loop = asyncio.get_running_loop()
    failures: list[str] = []
    early, late = Reader(), Reader()
    with ThreadPoolExecutor(1) as pool:
        broadcasts = Broadcasts(loop, pool, failures.append)
        gate = threading.Event()
        pool.submit(gate.wait)
        readers = [cast(Link, early), cast(Link, late)]
        broadcasts.send(readers[:1], 0, 4, LARGE, DType.F32)
        broadcasts.send(readers[:1], 1, 2, SMALL, DType.F32)
        broadcasts.send(readers[1:], 1, 2, SMALL, DType.F32)
        assert (early.got, late.got) == ([], [])
        gate.set()
        async with asyncio.timeout(20):
            while len(early.got) < 2 or not late.got:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert early.got == [(0, 4), (1, 2)]
        assert late.got == [(1, 2)]
        broadcasts.send(readers, 1, 3, SMALL.clone(), DType.F32)
        assert early.got[2:] == [(1, 3)], "nothing is before it: it goes at once"
    assert early.wanted == {0: 4, 1: 3}
    assert not failures
