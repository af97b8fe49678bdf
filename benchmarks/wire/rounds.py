"""Whole rounds of a real syncer against the time that their bytes need at least.

Four learners of this process answer PULLs at once; a round ends when the last of them has decoded
the broadcast. Its floor: the bytes of all PUSHes and broadcasts at the rate of the bare sockets,
then those of the merge, moved once at the bandwidth of a plain copy (see `benchmarks.merge`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.merge import copier, seconds_of
from benchmarks.report import MIB, Report, median
from benchmarks.swarm import SyncerProcess, layout_of
from benchmarks.wire.ends import HOST
from wire import loop
from wire.dial import dial
from wire.dtypes import DType
from wire.group import Group, SendCounters
from wire.layout import NamedLayout
from wire.messages import (
    Broadcast,
    Hello,
    InitParams,
    Message,
    PullRequest,
    PushFragment,
)
from wire.tensors import decode_into

LEARNERS = 4
STREAMS = 4
DTYPE = DType.BF16
WARM = 2


class Member:
    """One learner: its group, what it answers, and where it decodes to."""

    def __init__(self, learner_id: int, numel: int, delta: memoryview) -> None:
        self.learner_id = learner_id
        self.version = 0
        self.pulls: asyncio.Queue[PullRequest] = asyncio.Queue()
        self.broadcasts: asyncio.Queue[Broadcast] = asyncio.Queue()
        self._delta = delta
        self._values = np.zeros(numel, np.float32)
        self._step = 0

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """Sort it."""
        if isinstance(message, PullRequest):
            self.pulls.put_nowait(message)
        elif isinstance(message, Broadcast):
            self.broadcasts.put_nowait(message)

    def on_closed(self, group: Group, reason: str) -> None:
        """The run is over."""

    def on_bad_budget(self, group: Group) -> None:
        """Never asked for."""

    def answer(self, group: Group, pull: PullRequest) -> None:
        """The delta of one more step."""
        self._step += 1
        push = PushFragment(
            self.learner_id,
            pull.fragment,
            pull.step,
            pull.attempt,
            self.version,
            self._step,
            1,
            16,
            self._delta,
        )
        group.send_bulk(pull.fragment, push)

    async def apply(self, threads: ThreadPoolExecutor) -> None:
        """Wait for the broadcast, decode it."""
        message = await self.broadcasts.get()
        self.version = message.version
        work = partial(decode_into, message.tensor, DTYPE, 0, self._values)
        await asyncio.get_running_loop().run_in_executor(threads, work)


async def play(port: int, layout: NamedLayout, rounds: int) -> list[float]:
    """Seconds of `rounds` rounds, after `WARM` that do not count."""
    numel = layout.fragments[0].numel
    delta = np.full(numel, 0x3A00, np.uint16).data.cast("B")
    seconds = []
    with ThreadPoolExecutor(2) as threads:
        members = [Member(number, numel, delta) for number in range(LEARNERS)]
        groups = [await join(port, layout, member, threads) for member in members]
        groups[0].send_bulk("init", InitParams(0, bytes(DTYPE.size(numel))))
        for index in range(WARM + rounds):
            pulls = [await member.pulls.get() for member in members]
            start = time.perf_counter()
            for member, group, pull in zip(members, groups, pulls, strict=True):
                member.answer(group, pull)
            await asyncio.gather(*(member.apply(threads) for member in members))
            if index >= WARM:
                seconds.append(time.perf_counter() - start)
        for group in groups:
            group.close()
            await group.wait_closed()
    return seconds


async def join(
    port: int, layout: NamedLayout, member: Member, threads: ThreadPoolExecutor
) -> Group:
    """Dial as this learner."""
    hello = Hello(
        learner_id=member.learner_id,
        generation=secrets.randbits(64) | 1,
        dtype=DTYPE,
        layout=layout.numeric,
        fingerprint=layout.fingerprint,
        contract=layout.fingerprint,
        profile=None,
        num_streams=STREAMS,
    )
    counters = SendCounters()
    return await dial(HOST, port, hello, sink=member, executor=threads, counters=counters)


def round_vs_floor(
    report: Report, directory: Path, size: int, rounds: int, raw_bytes_per_s: float
) -> None:
    """`size`: bytes of the fragment in f32; `raw_bytes_per_s`: of the bare sockets."""
    numel = size // 4
    layout = layout_of(fragments=1, numel=numel)
    with SyncerProcess(directory, "--quorum", str(LEARNERS), "--pipeline", "1") as process:
        taken = median(loop.run(play(process.port, layout, rounds)))
    copy, copied = copier(64 * MIB)
    moved = LEARNERS * DTYPE.size(numel) + 16 * numel
    # The best of several medians: a slow minute of the machine must not raise the floor.
    merge = min(seconds_of(copy, 3) for _ in range(5)) * moved / copied
    transfer = 2 * LEARNERS * DTYPE.size(numel) / raw_bytes_per_s
    floor = transfer + merge
    note = (
        f"at most 1.4; {taken * 1e3:.0f} ms for {size / MIB:.0f} MiB in bf16 and {LEARNERS} "
        f"learners; floor: transfer {transfer * 1e3:.0f} + merge {merge * 1e3:.0f} ms"
    )
    report.add("round_vs_floor", taken / floor, "x", note)
