"""Round trips of single small frames: the bare loop, and the product on it.

Each process stays on a core of its own, as if they were on two machines. Left alone, the scheduler
puts both on one core or on two as it likes, and in a virtual machine a wake-up across cores costs
many times one on the same core.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import numpy as np

from benchmarks.wire.ends import HOST, Setup
from benchmarks.wire.product import FarGroups, NearGroups, Waiter
from wire import loop
from wire.group import Group
from wire.messages import Heartbeat, Message, PullRequest

ECHOES = 1000
"""Round trips of one transfer."""


@contextmanager
def _alone(number: int) -> Iterator[None]:
    """Keep this thread on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class _Echo(asyncio.Protocol):
    """Hands what comes to `on_data`."""

    def __init__(self, on_data: Callable[[asyncio.Transport, bytes], None]) -> None:
        self._on_data = on_data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand over."""
        self._on_data(self.transport, data)


class FarEcho:
    """Sends back what comes."""

    def __init__(self, setup: Setup, announce: Callable[[int], None]) -> None:
        self._left = 0
        self._done = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=loop.new_event_loop)
        self._runner.run(self._open(announce))

    async def _open(self, announce: Callable[[int], None]) -> None:
        running = asyncio.get_running_loop()
        self._server = await running.create_server(lambda: _Echo(self._answer), HOST, 0)
        announce(self._server.sockets[0].getsockname()[1])

    def _answer(self, transport: asyncio.Transport, data: bytes) -> None:
        transport.write(data)
        self._left -= 1
        if not self._left:
            self._done.set()

    def transfer(self) -> None:
        """Answer `ECHOES` times."""
        self._left = ECHOES
        self._done.clear()
        with _alone(1):
            self._runner.run(_wait(self._done))

    def close(self) -> Mapping[str, float]:
        """Nothing to tell."""
        self._runner.close()
        return {}


class NearEcho:
    """Asks, and waits for every answer."""

    def __init__(self, setup: Setup, port: int) -> None:
        self._size = setup.size
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._seconds: list[float] = []
        self._runner = asyncio.Runner(loop_factory=loop.new_event_loop)
        self._echo = self._runner.run(self._open(port))

    async def _open(self, port: int) -> _Echo:
        running = asyncio.get_running_loop()
        _, echo = await running.create_connection(
            lambda: _Echo(lambda _, data: self._queue.put_nowait(data)), HOST, port
        )
        return echo

    def transfer(self) -> None:
        """Ask `ECHOES` times."""
        with _alone(0):
            self._runner.run(self._ask())

    async def _ask(self) -> None:
        question = bytes(self._size)
        for _ in range(ECHOES):
            start = time.perf_counter()
            self._echo.transport.write(question)
            await self._queue.get()
            self._seconds.append(time.perf_counter() - start)

    def close(self) -> Mapping[str, float]:
        """The median, in seconds."""
        self._runner.close()
        return {"p50": float(np.median(self._seconds))}


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


class _Answerer(Waiter):
    """Answers a HEARTBEAT with a PULL, like the echo without a turn of the loop in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """Answer; the last one is queued too, so that who waits goes on."""
        group.send_control(PullRequest(0, 1, 1))
        self.left -= 1
        if not self.left:
            super().on_message(group, message, arrived)


class FarControl(FarGroups):
    """Answers a HEARTBEAT with a PULL."""

    sink: _Answerer

    def make_sink(self) -> _Answerer:
        """See `Groups`."""
        return _Answerer()

    def transfer(self) -> None:
        """See `End`."""
        with _alone(1):
            super().transfer()

    async def exchange(self) -> None:
        """`ECHOES` times."""
        self.sink.left = ECHOES
        await self.sink.queue.get()


class NearControl(NearGroups):
    """Sends HEARTBEATs, waits for PULLs."""

    def __init__(self, setup: Setup, port: int) -> None:
        super().__init__(setup, port)
        self._seconds: list[float] = []

    def transfer(self) -> None:
        """See `End`."""
        with _alone(0):
            super().transfer()

    async def exchange(self) -> None:
        """`ECHOES` times."""
        for _ in range(ECHOES):
            start = time.perf_counter()
            self.groups[0].send_control(Heartbeat(0, 1))
            await self.sink.queue.get()
            self._seconds.append(time.perf_counter() - start)

    def close(self) -> Mapping[str, float]:
        """The median, in seconds."""
        super().close()
        return {"p50": float(np.median(self._seconds))}
