"""Whole groups through TLS and seals: who gets in, and what strangers do not disturb."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from syncer.keys import create_all
from wire.accept import Acceptor, Newcomer
from wire.dial import dial
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.frames import Role
from wire.group import Group, SendCounters, Timeouts
from wire.layout import parse_layout
from wire.messages import Broadcast, ErrorMessage, Hello, Message, PushFragment
from wire.replay import ReplayGuard
from wire.security import AuthKey, open_hello, seal
from wire.tls import (
    LearnerTlsFiles,
    SyncerTls,
    SyncerTlsFiles,
    check_identity,
    learner_context,
)
from wire.tls_stream import TlsDoor, TlsFailure

NUMEL = 2_000_000
LAYOUT = parse_layout(memoryview(struct.pack("<BIQ", 0, 1, NUMEL)), 1)[0]
TENSOR = bytes(4 * NUMEL)
KEY = AuthKey(b"k" * 32)
LIMIT = 20


class Sink:
    """Messages and the end of a group, to be awaited."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.group: Group | None = None

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        self.messages.put_nowait(message)

    def on_closed(self, group: Group, reason: str) -> None:
        self.reason.set_result(reason)

    def on_bad_budget(self, group: Group) -> None: ...

    async def next(self) -> Message:
        async with asyncio.timeout(LIMIT):
            return await self.messages.get()

    async def end(self) -> str:
        async with asyncio.timeout(LIMIT):
            return await self.reason


class Syncer:
    """Accepts by S2, S4 and S12, like the server does."""

    def __init__(
        self, keys: list[AuthKey], tls: TlsDoor | None, executor: ThreadPoolExecutor
    ) -> None:
        self.keys = keys
        self.guard = ReplayGuard()
        self.groups: asyncio.Queue[tuple[Group, Sink]] = asyncio.Queue()
        self.acceptor = Acceptor(
            self, learners=3, executor=executor, tls=tls, timeouts=Timeouts(handshake=1.5)
        )
        self.port = 0

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        try:
            hello = open_hello(self.keys, payload, 3)
            check_identity(newcomer.certificate, hello.learner_id)
            if self.keys:
                self.guard.check(hello.learner_id, hello.generation)
        except ProtocolError as error:
            newcomer.refuse(error)
            return
        self.guard.remember(hello.learner_id, hello.generation)
        sink = Sink()
        self.groups.put_nowait((newcomer.adopt(hello, sink), sink))

    async def next_group(self) -> tuple[Group, Sink]:
        async with asyncio.timeout(LIMIT):
            return await self.groups.get()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki") / "keys"
    create_all(directory, 3, ["localhost"], datetime.now(UTC))
    return directory


@pytest.fixture(scope="module")
def executor() -> ThreadPoolExecutor:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@contextlib.asynccontextmanager
async def serving(
    executor: ThreadPoolExecutor, keys: list[AuthKey], pki: Path | None = None
) -> AsyncIterator[Syncer]:
    door = None
    if pki is not None:
        tls = SyncerTls(SyncerTlsFiles(pki / "server.pem", pki / "server-key.pem", pki / "ca.pem"))
        door = TlsDoor(Role.SYNCER, lambda: tls.context)
    syncer = Syncer(keys, door, executor)
    _, syncer.port = await syncer.acceptor.listen("127.0.0.1", 0)
    try:
        yield syncer
    finally:
        syncer.acceptor.close()
        for group in syncer.acceptor.groups:
            group.close()


def hello(learner_id: int, generation: int, streams: int = 4) -> Hello:
    return Hello(learner_id, generation, DType.F32, LAYOUT, b"f" * 32, b"f" * 32, None, streams)


async def join(
    syncer: Syncer,
    executor: ThreadPoolExecutor,
    mine: Hello,
    *,
    pair: Path | None = None,
    seal_with: AuthKey | None = None,
) -> tuple[Group, Sink]:
    sink = Sink()
    context = None
    if pair is not None:
        key = pair.with_name(f"{pair.stem}-key.pem")
        context = learner_context(LearnerTlsFiles(pair.with_name("ca.pem"), pair, key))
    sealing: Callable[[bytes], bytes] | None = None
    if seal_with is not None:
        sealing = lambda body: seal(seal_with, body)  # noqa: E731
    group = await dial(
        "127.0.0.1",
        syncer.port,
        mine,
        sink=sink,
        executor=executor,
        counters=SendCounters(),
        timeouts=Timeouts(dial=LIMIT),
        ssl=context,
        server_name="localhost",
        seal=sealing,
    )
    return group, sink


async def exchange(mine: Group, theirs: Group, here: Sink, there: Sink) -> None:
    """8 MB each way, striped over the data sockets."""
    mine.send_bulk(0, PushFragment(mine.learner_id, 0, 1, 1, 0, 1, 1, 1, TENSOR))
    theirs.send_bulk(0, Broadcast(0, 1, TENSOR))
    push, broadcast = await there.next(), await here.next()
    assert isinstance(push, PushFragment)
    assert push.tensor == TENSOR
    assert isinstance(broadcast, Broadcast)
    assert broadcast.tensor == TENSOR


@pytest.mark.parametrize("streams", [0, 4])
async def test_a_group_works_through_tls_and_a_seal(
    keys: Path, executor: ThreadPoolExecutor, streams: int
) -> None:
    """S10: every socket; S1 and S12 together."""
    async with serving(executor, [KEY], keys) as syncer:
        mine, here = await join(
            syncer, executor, hello(1, 5, streams), pair=keys / "learner-1.pem", seal_with=KEY
        )
        theirs, there = await syncer.next_group()
        await exchange(mine, theirs, here, there)
        assert theirs.certificate is not None
        assert theirs.certificate.learner_ids == {1}
        mine.close()
        await there.end()


async def test_an_error_arrives_through_tls(keys: Path, executor: ThreadPoolExecutor) -> None:
    """W38: the text is not lost, whatever the learner is sending."""
    async with serving(executor, [], keys) as syncer:
        mine, here = await join(syncer, executor, hello(1, 5), pair=keys / "learner-1.pem")
        theirs, there = await syncer.next_group()
        mine.send_bulk(0, PushFragment(2, 0, 1, 1, 0, 1, 1, 1, TENSOR))
        assert "identity" in await there.end()
        message = await here.next()
        assert isinstance(message, ErrorMessage)
        assert message.text.startswith("identity: ")
        assert theirs.closed


async def test_wrong_key_and_stolen_id_never_enter(
    keys: Path, executor: ThreadPoolExecutor
) -> None:
    """S2, S12: refused on their own socket; the served learner goes on."""
    async with serving(executor, [KEY], keys) as syncer:
        served, here = await join(
            syncer, executor, hello(1, 5), pair=keys / "learner-1.pem", seal_with=KEY
        )
        theirs, there = await syncer.next_group()
        for mine, pair, key in [
            (hello(2, 6, 0), "learner-2.pem", AuthKey(b"w" * 32)),
            (hello(2, 6, 0), "learner-2.pem", None),
            (hello(1, 7, 0), "learner-2.pem", KEY),
        ]:
            _, sink = await join(syncer, executor, mine, pair=keys / pair, seal_with=key)
            message = await sink.next()
            assert isinstance(message, ErrorMessage)
            assert message.text.startswith("auth: ")
        assert syncer.groups.empty()
        await exchange(served, theirs, here, there)


async def test_a_data_socket_needs_the_certificate_of_its_group(
    keys: Path, executor: ThreadPoolExecutor
) -> None:
    """S12: DATA_HELLO with another certificate is refused and takes no place."""
    from wire.messages import DataHello, encode_frame

    async with serving(executor, [], keys) as syncer:
        _, _ = await join(syncer, executor, hello(1, 5, 0), pair=keys / "learner-1.pem")
        victim, _ = await syncer.next_group()
        victim.num_streams = 1
        context = learner_context(
            LearnerTlsFiles(keys / "ca.pem", keys / "learner-2.pem", keys / "learner-2-key.pem")
        )
        for generation in (5, 6):  # its own, and one that no group has
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", syncer.port, ssl=context, server_hostname="localhost"
            )
            writer.write(encode_frame(DataHello(1, generation, 0)))
            async with asyncio.timeout(LIMIT):
                answer = await reader.read()
            assert answer[13:].startswith(b"auth: ")
        assert victim.takes(1)
        assert not victim.closed
        writer.close()


async def test_a_replayed_hello_is_refused(executor: ThreadPoolExecutor) -> None:
    """S4: also after the group it belonged to has gone."""
    async with serving(executor, [KEY]) as syncer:
        first, _ = await join(syncer, executor, hello(1, 5, 0), seal_with=KEY)
        _, there = await syncer.next_group()
        first.close()
        await there.end()
        _, sink = await join(syncer, executor, hello(1, 5, 0), seal_with=KEY)
        message = await sink.next()
        assert isinstance(message, ErrorMessage)
        assert message.text.startswith("duplicate-generation: ")
        assert syncer.groups.empty()


async def test_a_stranger_without_certificate_is_told_why(
    keys: Path, executor: ThreadPoolExecutor
) -> None:
    """S13: the group's cause is a fatal TlsFailure, in dial or soon after."""
    async with serving(executor, [], keys) as syncer:
        sink = Sink()
        context = learner_context(LearnerTlsFiles(keys / "ca.pem"))
        cause: Exception | None = None
        try:
            group = await dial(
                "127.0.0.1",
                syncer.port,
                hello(1, 5),
                sink=sink,
                executor=executor,
                counters=SendCounters(),
                timeouts=Timeouts(dial=LIMIT),
                ssl=context,
                server_name="localhost",
            )
        except TlsFailure as failure:
            cause = failure
        else:
            await sink.end()
            cause = group.cause
        assert isinstance(cause, TlsFailure)
        assert cause.problem.fatal
        assert "requires a certificate" in cause.problem.reason
        assert syncer.groups.empty()


async def test_failed_handshakes_give_their_places_back(
    keys: Path, executor: ThreadPoolExecutor
) -> None:
    """S13: they count against --max-connections, and only while they last."""
    async with serving(executor, [], keys) as syncer:
        strangers = []
        for first in (b"x", b"\x16\x03\x01\x00\x05hello", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", syncer.port)
            writer.write(first)
            strangers.append((reader, writer))
        mine, here = await join(syncer, executor, hello(1, 5, 1), pair=keys / "learner-1.pem")
        theirs, there = await syncer.next_group()
        await exchange(mine, theirs, here, there)
        for reader, writer in strangers:  # the silent one is dropped at the handshake timeout
            async with asyncio.timeout(LIMIT):
                await reader.read()
            writer.close()
        assert not syncer.acceptor.pending
        assert syncer.acceptor.connections == 2
