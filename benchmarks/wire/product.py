"""Messages through the product: cut, checked, reassembled, scanned, handed to an owner."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import current_rss, peak_rss, reset_peak_rss
from benchmarks.wire.ends import HOST, Setup
from benchmarks.wire.raw import SERVER_NAME, ones
from wire import loop
from wire.accept import Acceptor, Newcomer
from wire.dial import dial
from wire.dtypes import DType
from wire.frames import Role
from wire.group import Group, SendCounters
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.messages import (
    Broadcast,
    Heartbeat,
    Hello,
    Message,
    PullRequest,
    PushFragment,
    decode_hello,
)
from wire.tls import LearnerTlsFiles, SyncerTls, SyncerTlsFiles, learner_context
from wire.tls_stream import TlsDoor

LEARNERS = 256
FLOAT = 4


class Waiter:
    """A sink that hands the next message to whoever waits for it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Message] = asyncio.Queue()

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """Queue it."""
        self.queue.put_nowait(message)

    def on_closed(self, group: Group, reason: str) -> None:
        """The peer has finished, or this process has."""

    def on_bad_budget(self, group: Group) -> None:
        """Never asked for."""


class Groups:
    """One side of as many groups as there are learners, all on one loop and one sink."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.sink = self.make_sink()
        self.groups: list[Group] = []
        self.executor = ThreadPoolExecutor(2)
        self.runner = asyncio.Runner(loop_factory=loop.new_event_loop)

    def make_sink(self) -> Waiter:
        """Where messages go."""
        return Waiter()

    def transfer(self) -> None:
        """See `End`."""
        self.runner.run(self.exchange())

    async def exchange(self) -> None:
        """One transfer, on the loop."""
        raise NotImplementedError

    def close(self) -> Mapping[str, float]:
        """Close the groups."""
        self.runner.run(self._close())
        self.runner.close()
        self.executor.shutdown()
        return {}

    async def _close(self) -> None:
        for group in self.groups:
            await group.flush()
            group.close()
            await group.wait_closed()


class FarGroups(Groups):
    """The syncer's side."""

    def __init__(self, setup: Setup, announce: Callable[[int], None]) -> None:
        super().__init__(setup)
        self._arrivals: asyncio.Queue[Group] = asyncio.Queue()
        self.runner.run(self._accept(announce))

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        """See `AcceptSink`: adopt everyone."""
        hello = decode_hello(payload, LEARNERS)
        self._arrivals.put_nowait(newcomer.adopt(hello, self.sink))

    async def _accept(self, announce: Callable[[int], None]) -> None:
        door = None
        if self.setup.directory:
            keys = Path(self.setup.directory)
            tls = SyncerTls(SyncerTlsFiles(keys / "server.pem", keys / "server-key.pem"))
            door = TlsDoor(Role.SYNCER, lambda: tls.context)
        acceptor = Acceptor(self, learners=LEARNERS, executor=self.executor, tls=door)
        _, port = await acceptor.listen(HOST, 0)
        announce(port)
        while len(self.groups) < self.setup.learners:
            self.groups.append(await self._arrivals.get())
        while any(group.attached < self.setup.streams for group in self.groups):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        acceptor.close()


class NearGroups(Groups):
    """The learners' side."""

    def __init__(self, setup: Setup, port: int) -> None:
        super().__init__(setup)
        self.runner.run(self._dial(port))

    async def _dial(self, port: int) -> None:
        layout = NumericLayout((numeric_fragment(MergeMode.RDA, [self.setup.size // FLOAT]),))
        context = None
        if self.setup.directory:
            context = learner_context(LearnerTlsFiles(Path(self.setup.directory) / "ca.pem"))
        for learner in range(self.setup.learners):
            generation, same = secrets.randbits(64) | 1, bytes(32)
            hello = Hello(
                learner, generation, DType.F32, layout, same, same, None, self.setup.streams
            )
            group = await dial(
                HOST,
                port,
                hello,
                sink=self.sink,
                executor=self.executor,
                counters=SendCounters(),
                ssl=context,
                server_name=SERVER_NAME,
            )
            self.groups.append(group)


class FarPush(FarGroups):
    """Receives PUSHes and answers each with a PULL."""

    def __init__(self, setup: Setup, announce: Callable[[int], None]) -> None:
        super().__init__(setup, announce)
        self._before = current_rss()
        reset_peak_rss()

    async def exchange(self) -> None:
        """One PUSH."""
        await self.sink.queue.get()
        self.groups[0].send_control(PullRequest(0, 1, 1))
        await self.groups[0].flush()

    def close(self) -> Mapping[str, float]:
        """What receiving has added to the process, in bytes."""
        added = peak_rss() - self._before
        super().close()
        return {"peak": added}


class NearPush(NearGroups):
    """Sends PUSHes."""

    def __init__(self, setup: Setup, port: int) -> None:
        super().__init__(setup, port)
        self._values = ones(setup.size)

    async def exchange(self) -> None:
        """One PUSH, and its answer."""
        self.groups[0].send_bulk(0, PushFragment(0, 0, 1, 1, 0, 1, 1, 1, self._values))
        await self.sink.queue.get()


class FarBroadcast(FarGroups):
    """Answers a HEARTBEAT with a broadcast to all groups."""

    def __init__(self, setup: Setup, announce: Callable[[int], None]) -> None:
        super().__init__(setup, announce)
        self._values = ones(setup.size)
        self._before = current_rss()
        reset_peak_rss()

    async def exchange(self) -> None:
        """One broadcast, shared by all."""
        await self.sink.queue.get()
        message = Broadcast(0, 1, self._values)
        for group in self.groups:
            group.send_bulk(0, message)
        for group in self.groups:
            await group.flush()

    def close(self) -> Mapping[str, float]:
        """What sending has added to the process, in bytes, beyond the encoded fragment."""
        added = peak_rss() - self._before
        super().close()
        return {"peak": added}


class NearBroadcast(NearGroups):
    """Asks with a HEARTBEAT, receives."""

    async def exchange(self) -> None:
        """One broadcast to all groups."""
        self.groups[0].send_control(Heartbeat(0, 1))
        for _ in self.groups:
            await self.sink.queue.get()
