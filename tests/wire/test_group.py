"""Groups on real sockets, both roles, both event loops (sections 7 to 11)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop

from tests.wire.endpoints import (
    LIMIT,
    QUICK,
    Syncer,
    bare_learner,
    hello,
    join,
    until,
)
from tests.wire.support import LAYOUT, chunk, chunks, frame, normal, push, tensor
from wire.errors import ErrorCode, ProtocolError
from wire.frames import SLICE_BYTES, MessageType
from wire.group import SendCounters, Timeouts
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.messages import (
    Broadcast,
    BudgetDone,
    FinalAck,
    FinalManifest,
    Heartbeat,
    PullRequest,
    Shutdown,
    encode_frame,
)
from wire.stream import LOCAL_SEND_BYTES

Run = Callable[[Coroutine[Any, Any, None]], None]
NUMEL = 3_000_000
BIG = NumericLayout((numeric_fragment(MergeMode.AVG, [NUMEL]),))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one kind of loop."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runner(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as it:
            it.run(asyncio.wait_for(main, LIMIT))

    return runner


def ramp(start: int) -> np.ndarray:
    return np.arange(start, start + NUMEL, dtype="<f4")


def raw(values: np.ndarray) -> memoryview:
    return memoryview(values).cast("B")


@pytest.mark.parametrize("streams", [0, 1, 4])
def test_bulk_in_both_directions(run: Run, streams: int) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, at_learner = await join(syncer, hello(streams, layout=BIG))
            group, at_syncer = await syncer.group()
            for turn in range(3):
                learner.send_bulk(0, push(0, data=raw(ramp(turn))))
                message = await at_syncer.next()
                assert np.array_equal(np.frombuffer(message.tensor, "<f4"), ramp(turn))
                assert not message.tensor.readonly  # codecs and compiled loops use it in place
                group.send_bulk(0, Broadcast(0, turn, raw(ramp(10 + turn))))
                message = await at_learner.next()
                assert message.version == turn
                assert np.array_equal(np.frombuffer(message.tensor, "<f4"), ramp(10 + turn))
            assert group.attached == streams
            assert learner.bytes_out == group.bytes_in
            assert group.bytes_out == learner.bytes_in
            learner.close()
            await at_syncer.end()

    run(main())


def test_order_of_completion_and_1000_control_messages(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, at_learner = await join(syncer, hello(2))
            group, at_syncer = await syncer.group()
            for step in range(1000):
                learner.send_control(Heartbeat(0, step))
                group.send_control(PullRequest(0, step, 1))
            for step in range(1000):
                assert await at_syncer.next() == Heartbeat(0, step)
                assert await at_learner.next() == PullRequest(0, step, 1)
            learner.send_control(BudgetDone(3))
            learner.send_control(FinalAck(9))
            group.send_control(FinalManifest(9, (1, 2, 3)))
            group.send_control(Shutdown())
            assert await at_syncer.next() == BudgetDone(3)
            assert await at_syncer.next() == FinalAck(9)
            assert await at_learner.next() == FinalManifest(9, (1, 2, 3))
            assert await at_learner.next() == Shutdown()

    run(main())


def test_a_control_message_waits_for_the_scan_of_what_came_before(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, _ = await join(syncer, hello(0, layout=BIG))
            _, at_syncer = await syncer.group()
            learner.send_bulk(0, push(0, data=raw(ramp(0))))
            await learner.flush()
            learner.send_control(Heartbeat(0, 1))
            await at_syncer.next()
            await at_syncer.next()
            assert at_syncer.log == ["PushFragment", "Heartbeat"]

    run(main())


# -- section 9 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 1, 2])
def test_w38_a_fault_on_any_socket_is_told_on_control_first(run: Run, where: int) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(2))
            ended: list[int] = []

            async def watch(index: int) -> None:
                await sockets[index].eof()
                ended.append(index)

            watching = [asyncio.create_task(watch(index)) for index in (1, 2)]
            sockets[where].send(frame(MessageType.PULL_REQ, bytes(16)))
            kind, text = await sockets[0].frame()
            assert kind is MessageType.ERROR
            assert text.startswith(b"bad-type: ")
            assert ended == []
            assert (await sink.end()).startswith("bad-type: ")
            assert group.fault is not None
            assert group.fault.code == "bad-type"
            sockets[0].close()
            await asyncio.gather(*watching)
            await group.wait_closed()
            assert len(syncer.acceptor.groups) == 0

    run(main())


@pytest.mark.parametrize("payload", [bytes(16), None], ids=["header", "body"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_w38_what_still_comes_is_discarded_until_eof(
    run: Run, where: int, payload: bytes | None
) -> None:
    """Also on the socket that brought the fault, in its header or in a frame that was read."""
    fault = frame(MessageType.PULL_REQ, payload) if payload else encode_frame(Heartbeat(1, 1))

    async def main() -> None:
        async with Syncer(Timeouts(linger=2 * LIMIT)) as syncer:
            sockets, group, _ = await bare_learner(syncer, hello(2))
            sockets[where].send(fault)
            kind, _ = await sockets[0].frame()
            assert kind is MessageType.ERROR
            async with asyncio.timeout(LIMIT):
                for _ in range(16):
                    sockets[0].send(bytes(1 << 20))
                    await sockets[0].writer.drain()
                sockets[0].writer.write_eof()
                await sockets[0].eof()
                await sockets[1].eof()
                await group.wait_closed()

    run(main())


def test_w38_the_linger_ends_even_if_the_peer_does_nothing(run: Run) -> None:
    async def main() -> None:
        async with Syncer(QUICK) as syncer:
            sockets, group, _ = await bare_learner(syncer, hello(1))
            sockets[1].send(b"x" * 13)
            assert (await sockets[0].frame())[0] is MessageType.ERROR
            await group.wait_closed()
            await sockets[1].eof()

    run(main())


def test_w38_the_error_follows_a_chunk_that_is_half_sent(run: Run) -> None:
    """S = 0: the frame under way is finished, so that the ERROR can be read."""

    async def main() -> None:
        async with Syncer() as syncer:
            (control,), group, _ = await bare_learner(syncer, hello(0, layout=BIG))
            group.send_bulk(0, Broadcast(0, 1, raw(ramp(0))))
            group.close(ProtocolError(ErrorCode.SUPERSEDED, "newer"))
            group.close(ProtocolError(ErrorCode.STOPPED, "not again"))
            kinds = [kind for kind, _ in await control.frames()]
            assert kinds[-1] is MessageType.ERROR
            assert set(kinds[:-1]) <= {MessageType.CHUNK}
            await group.wait_closed()

    run(main())


@pytest.mark.parametrize("where", [0, 1])
def test_eof_on_any_socket_closes_the_whole_group_without_error(run: Run, where: int) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(1))
            sockets[where].writer.write_eof()
            await sink.end()
            assert group.fault is None
            for peer in sockets:
                assert await peer.frames() == []

    run(main())


def test_w39_what_came_completely_before_the_close_counts(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            sockets, _, sink = await bare_learner(syncer, hello(2, layout=BIG))
            values = raw(ramp(5))
            inner = encode_frame(push(0, data=values))
            parts = chunks(0, inner, [4_000_000, 8_000_000])
            sockets[1].send(parts[0] + parts[2])
            sockets[2].send(parts[1] + chunk(1, inner, 0, 50))
            for peer in (sockets[1], sockets[2]):
                await peer.writer.drain()
            for peer in sockets:
                peer.writer.close()
            message = await sink.next()
            assert bytes(message.tensor) == bytes(values)
            await sink.end()
            assert sink.log == ["PushFragment"]

    run(main())


@pytest.mark.parametrize("layout", [LAYOUT, BIG], ids=["small", "large"])
def test_w11_a_value_that_is_not_finite_is_a_fault(run: Run, layout: NumericLayout) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            sockets, _, sink = await bare_learner(syncer, hello(1, layout=layout))
            good = tensor(0, layout=layout)
            bad = good[:-4] + np.float32(np.inf).tobytes()
            stream = b""
            for msg_id, data in enumerate((good, bad, good)):
                inner = encode_frame(push(0, data=data, step=msg_id))
                stream += b"".join(chunks(msg_id, inner, list(range(0, len(inner), 4_000_000))))
            sockets[1].send(stream)
            assert (await sockets[0].error()).startswith("non-finite: ")
            await sink.end()
            assert sink.log == ["PushFragment"]

    run(main())


def test_an_unchunked_large_push_is_scanned_too(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            (control,), _, sink = await bare_learner(syncer, hello(0, layout=BIG))
            values = ramp(0)
            control.send(encode_frame(push(0, data=raw(values))))
            message = await sink.next()
            assert np.array_equal(np.frombuffer(message.tensor, "<f4"), values)
            values[100] = np.nan
            control.send(encode_frame(push(0, data=raw(values))))
            assert (await control.error()).startswith("non-finite: ")

    run(main())


def test_w40_a_learner_reports_a_fault_and_sends_no_error(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, sink = await join(syncer, hello(1))
            group, at_syncer = await syncer.group()
            group._streams[0].put((frame(MessageType.HEARTBEAT, bytes(12)),))
            group._streams[0].flush()
            assert (await sink.end()).startswith("bad-type: ")
            assert learner.fault is not None
            await at_syncer.end()
            assert group.fault is None
            assert at_syncer.log == []

    run(main())


def test_p8_an_error_reaches_our_learner_unchunked(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            _, sink = await join(syncer, hello(4))
            group, _ = await syncer.group()
            group.close(ProtocolError(ErrorCode.SUPERSEDED, "a newer one came"))
            message = await sink.next()
            assert message.text == "superseded: a newer one came"
            await sink.end()

    run(main())


# -- section 10 --------------------------------------------------------------------------------


def test_output_to_the_same_machine_stays_short(run: Run) -> None:
    """Both ends of a loopback socket; the kernel counts its own bookkeeping too, so twice."""

    async def main() -> None:
        async with Syncer() as syncer:
            learner, _ = await join(syncer, hello(1))
            group, _ = await syncer.group()
            await until(lambda: group.attached == 1)
            for side in (learner, group):
                for stream in side._streams.values():
                    sock = stream.transport.get_extra_info("socket")
                    size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                    assert size <= 2 * LOCAL_SEND_BYTES

    run(main())


def test_w43_silence_after_a_heartbeat(run: Run) -> None:
    async def main() -> None:
        async with Syncer(Timeouts(heartbeat=0.4, stall=60, linger=0.3)) as syncer:
            quiet, never, _ = await bare_learner(syncer, hello(1, generation=1))
            silent, _, sink = await bare_learner(syncer, hello(1, generation=2))
            loop = asyncio.get_running_loop()
            start = loop.time()
            silent[0].send(encode_frame(Heartbeat(0, 1)))
            await asyncio.sleep(0.25)
            silent[1].send(chunk(0, encode_frame(push(0)), 0, 5))
            assert (await sink.end()).startswith("no byte")
            assert 0.6 <= loop.time() - start < 1.5
            assert await silent[0].frames() == []
            assert not never.closed
            assert quiet

    run(main())


def test_w43_a_trickle_is_no_silence(run: Run) -> None:
    """Bytes too few to wake the receiver of a long slice (`LOW_WATER`) count in time."""

    async def main() -> None:
        async with Syncer(Timeouts(heartbeat=0.4, stall=60, linger=0.3)) as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(1, layout=BIG))
            sockets[0].send(encode_frame(Heartbeat(0, 1)))
            slice_ = chunk(0, encode_frame(push(0, data=raw(ramp(0)))), 0, SLICE_BYTES)
            at = 100_000
            sockets[1].send(slice_[:at])
            for _ in range(40):
                await asyncio.sleep(0.03)
                sockets[1].send(slice_[at : at + 10])
                at += 10
            assert not group.closed
            assert (await sink.end()).startswith("no byte")

    run(main())


def test_w36_the_end_of_a_slice_is_not_waited_for(run: Run) -> None:
    """What a slice lacks may be less than the kernel gathers otherwise."""

    async def main() -> None:
        async with Syncer() as syncer:
            sockets, _, sink = await bare_learner(syncer, hello(1, layout=BIG))
            inner = encode_frame(push(0, data=raw(ramp(0))))
            for at in range(0, len(inner), SLICE_BYTES):
                slice_ = chunk(0, inner, at, min(SLICE_BYTES, len(inner) - at))
                for begin in (0, len(slice_) - 1001, len(slice_) - 1):
                    end = {0: -1001, len(slice_) - 1001: -1}.get(begin)
                    sockets[1].send(slice_[begin:end])
                    await asyncio.sleep(0.02)
            message = await sink.next()
            assert bytes(message.tensor) == raw(ramp(0))

    run(main())


def test_w44_output_without_progress(run: Run) -> None:
    async def main() -> None:
        async with Syncer(QUICK) as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(1, layout=BIG))
            sockets[1].writer.transport.pause_reading()
            for version in range(4):
                group.send_bulk(version, Broadcast(0, version, raw(ramp(0))))
            assert "output" in await sink.end()
            assert group.fault is None

    run(main())


SMALL = NumericLayout((numeric_fragment(MergeMode.AVG, [1_100_000]),))


def test_w32_a_socket_waits_for_memory_and_goes_on(run: Run) -> None:
    """Partial messages up to A + 64 MiB; then only the oldest goes on, then all."""

    async def main() -> None:
        async with Syncer() as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(2, layout=SMALL))
            inners = [encode_frame(push(0, data=tensor(0, layout=SMALL))) for _ in range(20)]
            for msg_id, inner in enumerate(inners):
                sockets[1].send(chunk(msg_id, inner, 0, 4_000_000))
            await until(lambda: group._inbound.blocked)
            assert sink.log == []
            for msg_id, inner in enumerate(inners):
                sockets[2].send(chunk(msg_id, inner, 4_000_000, 4_194_304))
            for _ in inners:
                await sink.next()
            assert group._inbound._chunks.held == 0

    run(main())


def test_w32_reassembly_without_progress(run: Run) -> None:
    async def main() -> None:
        async with Syncer(QUICK) as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(1, layout=SMALL))
            inner = encode_frame(push(0, data=tensor(0, layout=SMALL)))
            for msg_id in range(20):
                sockets[1].send(chunk(msg_id, inner, 0, 4_000_000))
            assert "reassembly" in await sink.end()
            assert group.fault is None

    run(main())


# -- section 11 --------------------------------------------------------------------------------


def test_w46_a_reader_that_does_not_read_gets_only_the_newest(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            sockets, group, _ = await bare_learner(syncer, hello(1, layout=BIG))
            sockets[1].writer.transport.pause_reading()
            sent: list[int] = []
            for version in range(1, 30):
                data = Broadcast(0, version, raw(ramp(version)))
                group.send_bulk(0, data, lambda version=version: sent.append(version))
                await asyncio.sleep(0)
                stream = group._streams[1]
                assert stream.unsent <= 8 * 2**20
            assert group.queued_bytes < 3 * 4 * NUMEL
            sockets[1].writer.transport.resume_reading()
            got: dict[int, int] = {}
            while 29 not in sent or sum(got.values()) < len(sent) * (4 * NUMEL + 25):
                kind, payload = await sockets[1].frame()
                assert kind is MessageType.CHUNK
                msg_id = int.from_bytes(payload[:8], "little")
                got[msg_id] = got.get(msg_id, 0) + len(payload) - 24
            assert sent == sorted(sent)
            assert sent[-1] == 29
            assert len(sent) < 10
            assert list(got) == list(range(len(sent)))

    run(main())


def test_w45_control_does_not_wait_behind_bulk(run: Run) -> None:
    """S = 1: a PULL arrives while the data socket is stuck."""

    async def main() -> None:
        async with Syncer() as syncer:
            sockets, group, _ = await bare_learner(syncer, hello(1, layout=BIG))
            sockets[1].writer.transport.pause_reading()
            for key in range(5):
                group.send_bulk(key, Broadcast(0, key, raw(ramp(0))))
            group.send_control(PullRequest(0, 3, 1))
            assert await sockets[0].frame() == (
                MessageType.PULL_REQ,
                encode_frame(PullRequest(0, 3, 1))[13:],
            )

    run(main())


def test_l40_a_report_is_sent_though_a_push_is_stuck(run: Run) -> None:
    """The end of the connection, right after it, leaves the push behind and not the report."""

    async def main() -> None:
        async with Syncer() as syncer:
            learner, at_learner = await join(syncer, hello(1, layout=BIG))
            group, _ = await syncer.group()
            await until(lambda: group.attached == 1)
            group._streams[1].transport.pause_reading()
            for key in range(5):
                learner.send_bulk(key, push(0, data=raw(ramp(0))))
            flushing = asyncio.create_task(learner.flush())
            learner.send_control(BudgetDone(7))
            assert await learner.control_sent()
            assert not flushing.done()
            sent = learner.control_sent()
            group.close()
            await at_learner.end()
            await flushing
            assert sent.result()
            assert await learner.control_sent() is False

    run(main())


def test_w45_control_goes_between_two_chunks_of_stream_0(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            (control,), group, _ = await bare_learner(syncer, hello(0, layout=BIG))
            control.writer.transport.pause_reading()
            for key in range(4):
                group.send_bulk(key, Broadcast(0, key, raw(ramp(0))))
            for step in range(3):
                group.send_control(PullRequest(0, step, 1), key=step)
            assert group.withdraw_control(1)
            control.writer.transport.resume_reading()
            kinds = [(await control.frame())[0] for _ in range(4 * 3 + 2)]
            first = kinds.index(MessageType.PULL_REQ)
            assert kinds[first : first + 2] == [MessageType.PULL_REQ] * 2
            assert first < 4
            assert kinds.count(MessageType.CHUNK) == 12

    run(main())


def test_flush_waits_for_what_one_turn_collects(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            (control,), group, _ = await bare_learner(syncer, hello(0))
            before = group.bytes_out
            group.send_bulk(0, Broadcast(0, 1, memoryview(tensor(0))))
            waiting = group.queued_bytes
            assert waiting > 0
            await group.flush()
            assert group.queued_bytes == 0
            assert group.bytes_out == before + waiting
            assert (await control.frame())[0] is MessageType.CHUNK

    run(main())


def test_on_one_socket_that_keeps_up_everything_comes_in_the_order_it_was_sent(run: Run) -> None:
    """A client that asks nothing of W45 knows the base of a PULL when it comes."""

    async def main() -> None:
        async with Syncer() as syncer:
            (control,), group, _ = await bare_learner(syncer, hello(0))
            for step in range(1, 4):
                for fragment in range(2):
                    values = memoryview(tensor(fragment))
                    group.send_bulk(fragment, Broadcast(fragment, step, values))
                group.send_control(PullRequest(0, step, 1))
            kinds = [(await control.frame())[0] for _ in range(9)]
            turn = [MessageType.CHUNK, MessageType.CHUNK, MessageType.PULL_REQ]
            assert kinds == turn * 3

    run(main())


def test_w48_at_most_two_tensors_wait_for_the_owner(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            sockets, group, sink = await bare_learner(syncer, hello(1))
            sink.hold = True
            stream = b"".join(
                chunk(step, encode_frame(push(0, step=step)), 0, 128 + 13) for step in range(6)
            )
            sockets[1].send(stream)
            for step in range(6):
                assert normal(await sink.next()) == normal(push(0, step=step))
                await asyncio.sleep(0.02)
                assert len(sink.log) <= step + 2
                group.release()

    run(main())


def test_flush_and_finish(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, at_learner = await join(syncer, hello(2, layout=BIG))
            group, at_syncer = await syncer.group()
            learner.send_bulk(0, push(0, data=raw(ramp(0))))
            await learner.flush()
            assert learner.queued_bytes == 0
            group.send_bulk(0, Broadcast(0, 1, raw(ramp(0))))
            group.send_control(Shutdown())
            finishing = asyncio.create_task(group.finish())
            await at_learner.end()
            await finishing
            await at_syncer.end()
            assert sorted(at_learner.log) == ["Broadcast", "Shutdown"]

    run(main())


def test_closing_is_idempotent_and_sends_are_dropped(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, sink = await join(syncer, hello(1))
            learner.close()
            learner.close()
            learner.send_control(Heartbeat(0, 1))
            learner.send_bulk(0, push(0))
            await learner.flush()
            await learner.wait_closed()
            await learner.wait_closed()
            assert await sink.end() == "closed"
            assert learner.queued_bytes == 0

    run(main())


def test_c75_a_bad_budget_report_is_told_to_the_owner(run: Run) -> None:
    async def main() -> None:
        async with Syncer(report_bad_budget=True) as syncer:
            (control,), _, sink = await bare_learner(syncer, hello(0))
            control.send(frame(MessageType.BUDGET_DONE, bytes(9)))
            assert (await control.error()).startswith("bad-length: ")
            await sink.end()
            assert sink.bad_budgets == 1

    run(main())


def test_w26_a_learners_ids_run_on_across_groups(run: Run) -> None:
    async def main() -> None:
        counters = SendCounters()
        async with Syncer() as syncer:
            for turn in range(3):
                learner, _ = await join(syncer, hello(2, generation=turn + 1), counters)
                _, at_syncer = await syncer.group()
                learner.send_bulk(0, push(0, step=turn))
                assert (await at_syncer.next()).step == turn
                assert counters.msg_id == turn + 1
                learner.close()
                await at_syncer.end()

    run(main())


def test_w4_socket_options(run: Run) -> None:
    async def main() -> None:
        async with Syncer() as syncer:
            learner, _ = await join(syncer, hello(1))
            group, _ = await syncer.group()
            for end in (learner, group):
                for stream in end._streams.values():
                    sock = stream.transport.get_extra_info("socket")

                    def option(name: str, level: int = socket.IPPROTO_TCP, sock: Any = sock) -> int:
                        return int(sock.getsockopt(level, getattr(socket, name)))

                    assert option("TCP_NODELAY") == 1
                    assert option("SO_KEEPALIVE", socket.SOL_SOCKET) == 1
                    assert option("TCP_KEEPIDLE") == 30
                    assert option("TCP_KEEPINTVL") == 10
                    assert option("TCP_KEEPCNT") == 6
                    assert option("TCP_USER_TIMEOUT") == 60_000

    run(main())
