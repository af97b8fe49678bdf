"""Real sockets for tests: a syncer's door, a learner's group, and bare peers that speak bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from tests.wire.support import LAYOUT
from wire.accept import Acceptor, Newcomer
from wire.dial import dial
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.frames import FRAME_BYTES, FRAME_HEADER, MessageType
from wire.group import Group, SendCounters, Timeouts
from wire.layout import NumericLayout
from wire.messages import DataHello, Hello, Message, decode_hello, encode_frame

HOST = "127.0.0.1"
LIMIT = 20
"""Seconds after which a test that waits has failed."""
QUICK = Timeouts(handshake=0.3, heartbeat=0.4, stall=0.4, linger=0.3, dial=5)
PATIENT = Timeouts(linger=0.5)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Sink:
    """Collects what a group reports."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.log: list[str] = []
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.hold = False
        self.bad_budgets = 0

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        assert not self.closed.done(), "a message after on_closed"
        assert arrived <= asyncio.get_running_loop().time() + 1
        if self.hold:
            group.hold()
        self.messages.put_nowait(message)
        self.log.append(type(message).__name__)

    def on_closed(self, group: Group, reason: str) -> None:
        assert group.closed
        self.closed.set_result(reason)

    def on_bad_budget(self, group: Group) -> None:
        self.bad_budgets += 1

    async def next(self) -> Message:
        async with asyncio.timeout(LIMIT):
            return await self.messages.get()

    async def end(self) -> str:
        async with asyncio.timeout(LIMIT):
            return await asyncio.shield(self.closed)


class Syncer:
    """Accepts every HELLO that can be read; `judge` may refuse one."""

    def __init__(self, timeouts: Timeouts = PATIENT, **options: object) -> None:
        self.executor = ThreadPoolExecutor(2)
        self.sinks: list[Sink] = []
        self.groups: asyncio.Queue[Group] = asyncio.Queue()
        self.newcomers: list[Newcomer] = []
        self.refusal: ProtocolError | None = None
        self.hesitate = False
        self.acceptor = Acceptor(
            self, learners=8, executor=self.executor, timeouts=timeouts, **options
        )  # type: ignore[arg-type]
        self.port = 0

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        self.newcomers.append(newcomer)
        if self.refusal is not None:
            newcomer.refuse(self.refusal)
        elif not self.hesitate:
            self.adopt(newcomer, decode_hello(payload, 8))

    def adopt(self, newcomer: Newcomer, hello: Hello) -> Group:
        sink = Sink()
        group = newcomer.adopt(hello, sink)
        self.sinks.append(sink)
        self.groups.put_nowait(group)
        return group

    async def group(self) -> tuple[Group, Sink]:
        async with asyncio.timeout(LIMIT):
            group = await self.groups.get()
        return group, group._sink  # type: ignore[return-value]

    async def __aenter__(self) -> Syncer:
        _, self.port = await self.acceptor.listen(HOST, 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.acceptor.close()
        for group in self.acceptor.groups:
            group.close()
            await group.wait_closed()
        self.executor.shutdown()


def hello(
    streams: int = 0,
    generation: int = 11,
    learner: int = 0,
    layout: NumericLayout = LAYOUT,
    dtype: DType = DType.F32,
) -> Hello:
    return Hello(learner, generation, dtype, layout, b"f" * 32, b"c" * 32, None, streams)


async def join(
    syncer: Syncer, who: Hello, counters: SendCounters | None = None, timeouts: Timeouts = PATIENT
) -> tuple[Group, Sink]:
    """A learner's group."""
    sink = Sink()
    group = await dial(
        HOST,
        syncer.port,
        who,
        sink=sink,
        executor=syncer.executor,
        counters=counters or SendCounters(),
        timeouts=timeouts,
    )
    return group, sink


class Bare:
    """One socket that sends and reads bytes as a test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> tuple[MessageType, bytes]:
        async with asyncio.timeout(LIMIT):
            header = await self.reader.readexactly(FRAME_BYTES)
            _, kind, length = FRAME_HEADER.unpack(header)
            return MessageType(kind), await self.reader.readexactly(length)

    async def frames(self) -> list[tuple[MessageType, bytes]]:
        """All frames until the end."""
        out = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                out.append(await self.frame())
        return out

    async def error(self) -> str:
        """The text of an ERROR, which must be the next frame, and the last."""
        kind, payload = await self.frame()
        assert kind is MessageType.ERROR
        await self.eof()
        return payload.decode()

    async def eof(self) -> None:
        async with asyncio.timeout(LIMIT):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.transport.abort()


async def bare(syncer: Syncer, data: bytes = b"") -> Bare:
    """A socket to the syncer."""
    peer = Bare(*await asyncio.open_connection(HOST, syncer.port, limit=2**26))
    if data:
        peer.send(data)
    return peer


async def bare_learner(syncer: Syncer, who: Hello) -> tuple[list[Bare], Group, Sink]:
    """A learner whose sockets are bare: control, then its data sockets, all attached."""
    sockets = [await bare(syncer, encode_frame(who))]
    group, sink = await syncer.group()
    for index in range(who.num_streams):
        data_hello = DataHello(who.learner_id, who.generation, index)
        sockets.append(await bare(syncer, encode_frame(data_hello)))
    await until(lambda: group.attached == who.num_streams)
    return sockets, group, sink


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[tuple[int, asyncio.Queue[Bare]]]:
    """A bare syncer: its port and the sockets that come."""
    queue: asyncio.Queue[Bare] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda reader, writer: queue.put_nowait(Bare(reader, writer)), HOST, 0, limit=2**26
    )
    async with server:
        yield server.sockets[0].getsockname()[1], queue
