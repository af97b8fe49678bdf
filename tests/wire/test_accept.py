"""The door and the dial: first frames, refusals, data sockets and their groups (W7, W13, W17, L10)."""

from __future__ import annotations

import asyncio
import errno
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.wire.endpoints import (
    HOST,
    PATIENT,
    QUICK,
    Sink,
    Syncer,
    bare,
    bare_learner,
    hello,
    join,
    listener,
    until,
)
from tests.wire.support import frame, push
from wire.accept import Acceptor
from wire.dial import dial
from wire.errors import ErrorCode, ProtocolError
from wire.frames import HELLO_LIMIT, MessageType
from wire.group import SendCounters, Timeouts
from wire.messages import (
    DataHello,
    ErrorMessage,
    Heartbeat,
    decode_data_hello,
    decode_hello,
    encode_frame,
)

REFUSAL = ProtocolError(ErrorCode.SESSION_MISMATCH, "the fingerprint differs")


async def test_w7_no_first_frame_in_time_is_closed_silently() -> None:
    async with Syncer(QUICK) as syncer:
        for beginning in (b"", b"\xde\xc0", encode_frame(hello())[:40]):
            peer = await bare(syncer, beginning)
            assert await peer.frames() == []
        await until(lambda: syncer.acceptor.connections == 0)
        assert not syncer.newcomers


async def test_eof_before_the_first_frame_is_silent() -> None:
    async with Syncer() as syncer:
        peer = await bare(syncer, encode_frame(hello())[:40])
        peer.writer.write_eof()
        assert await peer.frames() == []
        assert not syncer.acceptor.pending


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bad-magic"),
        (encode_frame(Heartbeat(0, 1)), "bad-type"),
        (frame(MessageType.HELLO, b"", length=HELLO_LIMIT + 1), "too-long"),
        (frame(MessageType.DATA_HELLO, bytes(17)), "bad-length"),
        (frame(MessageType.DATA_HELLO, bytes(16)), "version"),
        (encode_frame(DataHello(8, 1, 0)), "learner-id"),
        (encode_frame(DataHello(1, 0, 0)), "generation"),
    ],
)
async def test_a_bad_first_frame_is_told_on_that_socket(first: bytes, code: str) -> None:
    async with Syncer() as syncer:
        peer = await bare(syncer, first)
        assert (await peer.error()).startswith(f"{code}: ")
        peer.close()
        await until(lambda: syncer.acceptor.connections == 0)


async def test_w13_a_refused_hello_touches_nobody_else() -> None:
    async with Syncer() as syncer:
        sockets, group, sink = await bare_learner(syncer, hello(1))
        syncer.refusal = REFUSAL
        other = await bare(syncer, encode_frame(hello(1)))
        assert await other.error() == "session-mismatch: the fingerprint differs"
        sockets[0].send(encode_frame(Heartbeat(0, 1)))
        assert await sink.next() == Heartbeat(0, 1)
        assert syncer.acceptor.groups.get(0, 11) is group


async def test_w14_what_follows_a_hello_waits_for_its_acceptance() -> None:
    async with Syncer() as syncer:
        syncer.hesitate = True
        who = hello()
        await bare(syncer, encode_frame(who) + encode_frame(Heartbeat(0, 5)))
        await until(lambda: bool(syncer.newcomers))
        await asyncio.sleep(0.05)
        syncer.adopt(syncer.newcomers[0], who)
        _, sink = await syncer.group()
        assert await sink.next() == Heartbeat(0, 5)


async def test_w17_a_data_socket_waits_for_its_group() -> None:
    async with Syncer() as syncer:
        early = [await bare(syncer, encode_frame(DataHello(0, 11, index))) for index in (1, 0)]
        await asyncio.sleep(0.05)
        early[1].send(encode_frame(push(0)))
        await bare(syncer, encode_frame(hello(2)))
        group, sink = await syncer.group()
        await until(lambda: group.attached == 2)
        assert (await sink.next()).fragment == 0


async def test_w17_unknown_group() -> None:
    async with Syncer(QUICK) as syncer:
        _, group, _ = await bare_learner(syncer, hello(1, generation=5))
        peer = await bare(syncer, encode_frame(DataHello(0, 6, 0)))
        assert (await peer.error()).startswith("unknown-group: ")
        group.close()
        late = await bare(syncer, encode_frame(DataHello(0, 5, 0)))
        assert (await late.error()).startswith("unknown-group: ")


async def test_w17_stream_index() -> None:
    async with Syncer() as syncer:
        sockets, group, sink = await bare_learner(syncer, hello(2))
        for index in (0, 1, 2, 65535):
            peer = await bare(syncer, encode_frame(DataHello(0, 11, index)))
            assert (await peer.error()).startswith("stream-index: ")
        sockets[2].send(encode_frame(Heartbeat(0, 1)))
        assert await sink.next() == Heartbeat(0, 1)
        assert not group.closed


async def test_more_sockets_than_allowed_are_closed_silently() -> None:
    async with Syncer(max_connections=3) as syncer:
        sockets, _, sink = await bare_learner(syncer, hello(1))
        third = await bare(syncer)
        await until(lambda: syncer.acceptor.connections == 3)
        fourth = await bare(syncer, encode_frame(hello()))
        assert await fourth.frames() == []
        sockets[0].send(encode_frame(Heartbeat(0, 1)))
        assert await sink.next() == Heartbeat(0, 1)
        third.close()
        await until(lambda: syncer.acceptor.connections == 2)
        assert (await bare_learner(syncer, hello(generation=12)))[1].generation == 12


async def test_closing_the_door_drops_newcomers_and_keeps_groups() -> None:
    async with Syncer() as syncer:
        sockets, group, sink = await bare_learner(syncer, hello())
        waiting = await bare(syncer)
        await until(lambda: len(syncer.acceptor.pending) == 1)
        syncer.acceptor.close()
        assert await waiting.frames() == []
        with pytest.raises(OSError, match=r".*"):
            await bare(syncer)
        sockets[0].send(encode_frame(Heartbeat(0, 1)))
        assert await sink.next() == Heartbeat(0, 1)
        assert not group.closed


async def test_adopting_a_socket_that_is_gone_makes_a_group_that_ends() -> None:
    async with Syncer() as syncer:
        syncer.hesitate = True
        peer = await bare(syncer, encode_frame(hello()))
        await until(lambda: bool(syncer.newcomers))
        peer.close()
        await asyncio.sleep(0.02)
        syncer.adopt(syncer.newcomers[0], hello())
        _, sink = await syncer.group()
        await sink.end()
        assert len(syncer.acceptor.groups) == 0


async def test_a_port_that_is_not_free() -> None:
    async with Syncer() as syncer:
        other = Acceptor(syncer, learners=1, executor=syncer.executor)
        with pytest.raises(OSError, match="in use") as caught:
            await other.listen(HOST, syncer.port)
        assert caught.value.errno == errno.EADDRINUSE


async def test_localhost_has_one_port_on_all_its_addresses() -> None:
    syncer = Syncer()
    _, port = await syncer.acceptor.listen("localhost", 0)
    for info in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        with socket.socket(info[0], socket.SOCK_STREAM) as sock:
            sock.connect(info[4])
    syncer.acceptor.close()
    syncer.executor.shutdown()


# -- the dial ----------------------------------------------------------------------------------


async def test_l10_hello_comes_first_then_every_data_hello() -> None:
    async with listener() as (port, sockets):
        syncer = Syncer()
        sink = Sink()
        who = hello(3)
        dialling = asyncio.create_task(
            dial(HOST, port, who, sink=sink, executor=syncer.executor, counters=SendCounters())
        )
        control = await sockets.get()
        kind, payload = await control.frame()
        assert kind is MessageType.HELLO
        assert decode_hello(memoryview(payload), 8) == who
        group = await dialling
        indexes = set()
        for _ in range(3):
            kind, payload = await (await sockets.get()).frame()
            assert kind is MessageType.DATA_HELLO
            data = decode_data_hello(memoryview(payload), 8)
            assert (data.learner_id, data.generation) == (0, 11)
            indexes.add(data.stream_index)
        assert indexes == {0, 1, 2}
        assert group.attached == 3
        group.close()
        await sink.end()


async def test_s1_the_seal_covers_the_body() -> None:
    async with listener() as (port, sockets):
        syncer = Syncer()
        group = await dial(
            HOST,
            port,
            hello(),
            sink=Sink(),
            executor=syncer.executor,
            counters=SendCounters(),
            seal=lambda body: body + b"m" * 32,
        )
        _, payload = await (await sockets.get()).frame()
        assert payload == encode_frame(hello())[13:] + b"m" * 32
        group.close()


async def test_nobody_listens() -> None:
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
    syncer = Syncer()
    syncer.port = port
    with pytest.raises(ConnectionRefusedError):
        await join(syncer, hello(2))


async def test_a_dial_that_takes_too_long() -> None:
    with socket.create_server((HOST, 0), backlog=1) as listening:
        syncer = Syncer()
        syncer.port = listening.getsockname()[1]
        filler = [socket.socket() for _ in range(4)]
        for sock in filler:
            sock.setblocking(False)
            sock.connect_ex((HOST, syncer.port))
        with pytest.raises(TimeoutError, match=r"in 0\.2 s"):
            await join(syncer, hello(4), timeouts=Timeouts(dial=0.2))
        for sock in filler:
            sock.close()


async def test_an_error_during_the_dial_reaches_the_sink_and_on_closed_does_not() -> None:
    """The learner learns why, whether the dial noticed the end or not."""
    async with Syncer() as syncer:
        syncer.refusal = REFUSAL
        sink = Sink()
        try:
            group = await dial(
                HOST, syncer.port, hello(2), sink=sink, executor=syncer.executor,
                counters=SendCounters(), timeouts=PATIENT,
            )  # fmt: skip
        except OSError:
            assert not sink.closed.done()
        else:
            await sink.end()
            assert group.closed
        assert await sink.next() == ErrorMessage(REFUSAL.text)


async def test_all_sockets_of_a_failed_dial_are_closed() -> None:
    async with listener() as (port, sockets):
        syncer = Syncer()
        syncer.port = port
        dialling = asyncio.create_task(join(syncer, hello(3)))
        control = await sockets.get()
        await control.frame()
        control.close()
        group = None
        try:
            group, sink = await dialling
        except OSError:
            group = None
        if group is not None:
            await sink.end()
        for _ in range(3):
            peer = await sockets.get()
            await peer.frames()


async def test_a_long_error_before_the_hello_is_read_at_once() -> None:
    """More than a socket stages, sent as soon as the socket is there."""
    text = "stopped: " + "x" * 60_000
    async with listener() as (port, arrivals):
        sink = Sink()
        with ThreadPoolExecutor(1) as executor:
            dialled = asyncio.create_task(
                dial(
                    HOST,
                    port,
                    hello(),
                    sink=sink,
                    executor=executor,
                    counters=SendCounters(),
                    timeouts=PATIENT,
                )
            )
            peer = await arrivals.get()
            peer.send(encode_frame(ErrorMessage(text)))
            assert await sink.next() == ErrorMessage(text)
            group = await dialled
            group.close()
            await group.wait_closed()
            assert [kind for kind, _ in await peer.frames()] == [MessageType.HELLO]


def large_hello(size: int) -> bytes:
    """The frame of a HELLO of `size` bytes of payload that no one can read."""
    return frame(MessageType.HELLO, bytes(size))


async def test_large_hellos_take_turns_and_small_ones_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers hold a bounded amount of memory together, whoever they are (W6)."""
    monkeypatch.setattr("wire.accept.LARGE_HELLOS_BYTES", 300_000)
    async with Syncer() as syncer:
        syncer.hesitate = True
        large = syncer.acceptor.large
        await bare(syncer, large_hello(200_000))
        await until(lambda: len(syncer.newcomers) == 1)
        second = await bare(syncer, large_hello(200_000))
        await until(lambda: len(large) == 1)
        await bare(syncer, encode_frame(hello(generation=5)))
        await until(lambda: len(syncer.newcomers) == 2)
        assert large.free == 100_000

        # The payload is still being read when its socket goes: only the reader frees its room.
        syncer.newcomers[0].drop()
        assert large.free == 100_000
        syncer.newcomers[0].payload_read()
        await until(lambda: len(syncer.newcomers) == 3)
        assert (large.free, len(large)) == (100_000, 0)
        syncer.newcomers[2].refuse(REFUSAL)
        assert (await second.error()).startswith("session-mismatch")
        assert large.free == 300_000


async def test_who_waits_for_a_turn_is_still_bound_to_the_handshake_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W7: and a stranger that stops half way gives its room back."""
    monkeypatch.setattr("wire.accept.LARGE_HELLOS_BYTES", 300_000)
    async with Syncer(QUICK) as syncer:
        half = large_hello(200_000)[:150_000]
        peers = [await bare(syncer, half) for _ in range(4)]
        for peer in peers:
            assert await peer.frames() == []
        assert (syncer.acceptor.large.free, len(syncer.acceptor.large)) == (300_000, 0)
        await until(lambda: syncer.acceptor.connections == 0)
