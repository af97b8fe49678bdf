"""Round trips of single small frames: the bare loop, and the product on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from benchmarks.wire.ends import HOST, Setup
from benchmarks.wire.product import FarGroups, NearGroups
from wire import loop
from wire.messages import Heartbeat, PullRequest

ECHOES = 1000
"""Round trips of one transfer."""


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


class FarControl(FarGroups):
    """Answers a HEARTBEAT with a PULL."""

    async def exchange(self) -> None:
        """`ECHOES` times."""
        for _ in range(ECHOES):
            await self.sink.queue.get()
            self.groups[0].send_control(PullRequest(0, 1, 1))


class NearControl(NearGroups):
    """Sends HEARTBEATs, waits for PULLs."""

    def __init__(self, setup: Setup, port: int) -> None:
        super().__init__(setup, port)
        self._seconds: list[float] = []

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
