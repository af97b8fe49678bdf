"""The actor around a scripted core: order, tickets, timers, failures (C1, C30, C35, C40, W46)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from syncer import commands as c
from syncer import events as e
from syncer.broadcasts import INLINE_NUMEL
from syncer.merge.plan import MergeJob, MergeSettings, Response
from syncer.recorder import TapeFailed
from syncer.svd.scalar import ScalarSvd
from syncer.tape import TapeWriter
from tests.syncer.shell.fakes import LAYOUT, Bench, FakeNewcomer, hello
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.messages import (
    Broadcast,
    BudgetDone,
    FinalAck,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    InitParams,
    PullRequest,
    PushFragment,
    Shutdown,
)

A, B = e.Member(0, 1), e.Member(1, 2)
BIG = INLINE_NUMEL + 1


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(svd=ScalarSvd())
    yield made
    made.workers.shutdown()


def order(bench: Bench, *commands: c.Command) -> None:
    """Make the core answer the next event with `commands`."""
    bench.core.answers[e.Tick] = lambda _: list(commands)
    bench.actor.post(e.Tick())
    del bench.core.answers[e.Tick]


async def test_messages_of_a_group_become_events(bench: Bench) -> None:
    group = bench.join()
    sink = group.sink
    push = PushFragment(0, 1, 2, 3, 4, 5, 6, 7, b"")
    sink.on_message(group, push, 8.0)
    sink.on_message(group, Heartbeat(0, 9), 10.0)
    sink.on_message(group, InitParams(1, b"x"), 11.0)
    sink.on_message(group, FinalAck(12), 13.0)
    sink.on_message(group, BudgetDone(14), 15.0)
    sink.on_bad_budget(group)
    group.close()
    assert bench.core.events[1:] == [
        e.PushReceived(A, push, 8.0),
        e.HeartbeatReceived(A, 9, 10.0),
        e.InitReceived(A, 1, b"x"),
        e.FinalAckReceived(A, 12),
        e.BudgetDoneReceived(A, 14),
        e.BudgetDoneReceived(A, None),
        e.GroupClosed(A),
    ]
    assert bench.actor.links == {}


async def test_a_refused_hello_touches_only_its_socket(bench: Bench) -> None:
    """W13."""
    error = ProtocolError(ErrorCode.SESSION_MISMATCH, "no")
    bench.core.answers[e.HelloReceived] = lambda event: [c.RefuseHello(event.token, error)]
    newcomer = FakeNewcomer()
    bench.actor.hello(newcomer, hello())
    assert newcomer.refused is error
    assert bench.actor.links == {}


async def test_a_command_that_closes_a_group_does_not_reenter_the_core(bench: Bench) -> None:
    """The event of the closing comes after the commands of the one that ordered it."""
    group = bench.join()
    other = bench.join(1, 2)
    error = ProtocolError(ErrorCode.OVERFLOW, "too much")
    order(bench, c.CloseGroup(A, error), c.SendPull((A, B), 0, 1, 1))
    assert group.closed_with is error
    assert group.sent == []
    assert other.sent == [PullRequest(0, 1, 1)]
    assert bench.core.events[-1] == e.GroupClosed(A)


async def test_pulls_can_be_withdrawn_by_attempt(bench: Bench) -> None:
    """W45."""
    group = bench.join()
    order(bench, c.SendPull((A,), 2, 7, 1), c.SendPull((A, B), 2, 7, 2))
    order(bench, c.DropPulls((A, B), 7, 1))
    assert group.sent == [PullRequest(2, 7, 1), PullRequest(2, 7, 2)]
    assert group.withdrawn == [group.keys[0]]
    assert group.keys[0] != group.keys[1]


@pytest.mark.parametrize("numel", [4, BIG])
async def test_a_broadcast_is_encoded_once_and_shared(bench: Bench, numel: int) -> None:
    """W46."""
    groups = [bench.join(0, 1, DType.BF16), bench.join(1, 2, DType.BF16)]
    params = torch.ones(numel)
    order(bench, c.SendBroadcast((A, B), 1, 5, params))
    await bench.until(lambda: all(group.sent for group in groups))
    late = bench.join(2, 3, DType.BF16)
    order(bench, c.SendBroadcast((e.Member(2, 3),), 1, 5, params))
    messages = [group.sent[0] for group in (*groups, late)]
    assert all(message is messages[0] for message in messages)
    (message, *_) = messages
    assert isinstance(message, Broadcast)
    assert (message.fragment, message.version, len(message.tensor)) == (1, 5, 2 * numel)


async def test_another_dtype_is_encoded_anew(bench: Bench) -> None:
    """W19: the next session of a resumed run may have another dtype."""
    first = bench.join(0, 1, DType.F32)
    params = torch.ones(4)
    order(bench, c.SendBroadcast((A,), 0, 5, params))
    first.close()
    second = bench.join(1, 2, DType.BF16)
    order(bench, c.SendBroadcast((B,), 0, 5, params))
    (message,) = second.sent
    assert isinstance(message, Broadcast)
    assert len(message.tensor) == 8


async def test_an_older_version_never_follows_a_newer_one(bench: Bench) -> None:
    """W46: also when the encoding of the older one takes longer."""
    group = bench.join()
    order(
        bench,
        c.SendBroadcast((A,), 0, 1, torch.zeros(BIG)),
        c.SendBroadcast((A,), 0, 2, torch.zeros(4)),
    )
    await asyncio.get_running_loop().run_in_executor(bench.workers.encode, int)
    await bench.until(lambda: bool(group.sent))
    await asyncio.sleep(0.01)
    assert [message.version for message in group.sent] == [2]


@pytest.mark.parametrize("numel", [4, BIG])
async def test_the_cut_replaces_what_is_unsent_and_reports_when_queued(
    bench: Bench, numel: int
) -> None:
    """C60: no broadcast follows the cut, not even one that was still being encoded."""
    group = bench.join()
    params = tuple(torch.full((numel,), float(index)) for index in range(3))
    order(
        bench,
        c.SendBroadcast((A,), 0, 4, torch.zeros(BIG)),
        c.SendCut(A, 9, (9, 8, 7), params),
    )
    await bench.until(lambda: bool(bench.core.of(e.CutQueued)))
    assert group.withdrawn == [0]
    *fragments, manifest = group.sent
    assert all(isinstance(message, FinalFragment) for message in fragments)
    assert [(m.fragment, m.version) for m in fragments] == [(0, 9), (1, 8), (2, 7)]
    assert bytes(fragments[2].tensor) == params[2].numpy().tobytes()
    assert manifest == FinalManifest(9, (9, 8, 7))
    assert len(set(group.keys[:-1])) == 3
    late = bench.join(1, 2)
    order(bench, c.SendCut(B, 9, (9, 8, 7), params), c.SendShutdown(B))
    assert late.sent[0] is fragments[0]
    assert late.sent[-1] == Shutdown()


async def test_a_cut_to_a_group_that_closes_meanwhile_is_not_reported(bench: Bench) -> None:
    """C60: eligible only once all of it was queued without the group closing."""
    group = bench.join()
    order(bench, c.SendCut(A, 9, (9,), (torch.zeros(BIG),)))
    group.closed = True
    await asyncio.get_running_loop().run_in_executor(bench.workers.encode, int)
    await asyncio.sleep(0.01)
    assert bench.core.of(e.CutQueued) == []


async def test_init_is_decoded_in_the_bulk_dtype(bench: Bench) -> None:
    bench.join(0, 1, DType.Q4)
    data = b"\x80\x3f" * 4
    order(bench, c.DecodeInit(7, (data, data, data)))
    await bench.until(lambda: bool(bench.core.of(e.InitDecoded)))
    (event,) = bench.core.of(e.InitDecoded)
    assert event.ticket == 7
    assert [values.tolist() for values in event.params] == [[1.0] * 4] * 3


def job(payload: bytes) -> MergeJob:
    return MergeJob(
        fragment=LAYOUT.fragments[0],
        dtype=DType.F32,
        responses=(Response(A, payload, 16, 1),),
        params=torch.zeros(4),
        momentum=torch.zeros(4),
        settings=MergeSettings(lr=1.0, momentum=0.0, heloco=False, equal_weights=True),
    )


async def test_merges_run_off_the_loop_and_answer_by_ticket(bench: Bench) -> None:
    """C30, C34."""
    bench.join()
    good = torch.ones(4).numpy().tobytes()
    huge = torch.full((4,), 3.0e38).numpy().tobytes()
    order(bench, c.StartMerge(1, job(good)))
    await bench.until(lambda: bool(bench.core.of(e.MergeDone)))
    (done,) = bench.core.of(e.MergeDone)
    assert (done.ticket, done.result.params.tolist()) == (1, [1.0] * 4)
    assert done.seconds > 0
    doubled = MergeJob(
        fragment=LAYOUT.fragments[0],
        dtype=DType.F32,
        responses=(Response(A, huge, 16, 1),),
        params=torch.full((4,), 3.0e38),
        momentum=torch.zeros(4),
        settings=MergeSettings(lr=1.0, momentum=0.0, heloco=False, equal_weights=True),
    )
    order(bench, c.StartMerge(2, doubled))
    await bench.until(lambda: bool(bench.core.of(e.MergeRefused)))
    assert bench.core.of(e.MergeRefused) == [e.MergeRefused(2, A)]


async def test_a_merge_that_breaks_is_a_failure(bench: Bench) -> None:
    order(bench, c.StartMerge(1, job(b"short")))
    await bench.until(lambda: bool(bench.core.of(e.Failure)))
    assert "merge" in bench.core.of(e.Failure)[0].reason


async def test_saves_answer_by_ticket_and_keep_their_order(bench: Bench) -> None:
    """C32, C35, K12, K14."""
    snapshot = object()
    order(
        bench,
        c.SaveCheckpoint(1, c.SaveKind.PERIODIC, snapshot),
        c.SaveCheckpoint(2, c.SaveKind.TERMINAL, snapshot),
        c.WriteFinalState(3, snapshot),
        c.WriteMarker(4, 9),
        c.RemoveMarker(5),
    )
    await bench.until(lambda: len(bench.core.of(e.TaskDone)) == 3)
    assert bench.store.calls == [
        ("save", True, False),
        ("save", False, True),
        ("final",),
        ("marker", 9),
        ("unmark",),
    ]
    answers = bench.core.of(e.SaveDone) + bench.core.of(e.TaskDone)
    assert [event.ticket for event in answers] == [1, 2, 3, 4, 5]
    bench.store.error = OSError(28, "No space left on device")
    order(bench, c.SaveCheckpoint(6, c.SaveKind.PERIODIC, snapshot))
    await bench.until(lambda: bool(bench.core.of(e.SaveFailed)))
    (failed,) = bench.core.of(e.SaveFailed)
    assert failed.ticket == 6
    assert "No space left" in failed.reason


async def test_a_slow_disk_does_not_stop_the_actor(bench: Bench) -> None:
    """C1."""
    bench.store.gate.clear()
    order(bench, c.SaveCheckpoint(1, c.SaveKind.PERIODIC, object()))
    group = bench.join()
    order(bench, c.SendPull((A,), 0, 1, 1))
    assert group.sent
    assert bench.core.of(e.SaveDone) == []
    bench.store.gate.set()
    await bench.until(lambda: bool(bench.core.of(e.SaveDone)))


async def test_draining_without_a_pool_is_done_at_once(bench: Bench) -> None:
    order(bench, c.DrainPool(3))
    assert bench.core.of(e.TaskDone) == [e.TaskDone(3)]


async def test_a_poisoned_pool_is_a_failure() -> None:
    """N33."""

    def drain() -> None:
        raise RuntimeError("worker cpu died")

    bench = Bench(drain=drain)
    order(bench, c.DrainPool(3))
    await bench.until(lambda: bool(bench.core.of(e.Failure)))
    assert "worker cpu died" in bench.core.of(e.Failure)[0].reason
    bench.workers.shutdown()


async def test_one_timer_ticks_at_the_deadline(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    bench.core.deadline = loop.time() + 60
    bench.actor.post(e.StopSignal())
    await asyncio.sleep(0.01)
    bench.core.deadline = loop.time() + 0.03
    bench.actor.post(e.StopSignal())
    times: list[float] = []

    def tick(_: e.Tick) -> list[c.Command]:
        times.append(loop.time())
        bench.core.deadline = None
        return []

    bench.core.answers[e.Tick] = tick
    due = bench.core.deadline
    await bench.until(lambda: bool(times))
    assert due <= times[0] < due + 0.5
    await asyncio.sleep(0.02)
    assert len(times) == 1


async def test_a_deadline_beyond_all_clocks_is_no_trouble(bench: Bench) -> None:
    bench.core.deadline = float("inf")
    bench.actor.post(e.StopSignal())
    await asyncio.sleep(0.01)
    assert bench.core.of(e.Tick) == []


async def test_an_error_of_ours_ends_the_run_with_its_name(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: e.Tick) -> list[c.Command]:
        raise KeyError("t")

    bench.core.answers[e.Tick] = broken
    bench.actor.post(e.Tick())
    finish = bench.actor.finished.result()
    assert finish.code == 1
    assert "internal error: KeyError('t')" in finish.reason
    assert caplog.records[0].exc_info is not None
    bench.actor.post(e.StopSignal())
    assert bench.core.of(e.StopSignal) == []


async def test_tape_records_are_written_in_order_and_synced_before_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C40, C41 (`ts`)."""
    writer = TapeWriter(tmp_path / "tape")
    synced: list[int] = []
    real = writer.sync
    monkeypatch.setattr(
        writer,
        "sync",
        lambda: (synced.append((tmp_path / "tape").read_bytes().count(b"\n")), real()),
    )
    bench = Bench(tape=writer)
    records = [c.WriteTape({"event": "e", "n": number}) for number in range(50)]
    order(bench, *records, c.SaveCheckpoint(1, c.SaveKind.PERIODIC, object()))
    await bench.until(lambda: bool(bench.core.of(e.SaveDone)))
    assert synced[0] == 50
    order(bench, c.WriteTape({"event": "last", "n": 50}))
    await bench.actor.settle()
    lines = [json.loads(line) for line in (tmp_path / "tape").read_text().splitlines()]
    assert [line["n"] for line in lines] == list(range(51))
    assert all(isinstance(line["ts"], float) for line in lines)
    bench.workers.shutdown()


async def test_a_tape_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C35."""
    writer = TapeWriter(tmp_path / "tape")

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "append", full)
    bench = Bench(tape=writer)
    order(bench, c.WriteTape({"event": "e"}))
    await bench.until(lambda: bool(bench.core.of(e.Failure)))
    assert "No space left" in bench.core.of(e.Failure)[0].reason
    with pytest.raises(TapeFailed, match="No space left"):
        await bench.actor.settle()
    bench.workers.shutdown()


async def test_a_tape_that_fails_before_a_rename_ends_the_run_without_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C35: only a failed checkpoint is worth another try."""
    writer = TapeWriter(tmp_path / "tape")

    def broken() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer, "sync", broken)
    bench = Bench(tape=writer)
    order(bench, c.SaveCheckpoint(1, c.SaveKind.PERIODIC, object()))
    await bench.until(lambda: bool(bench.core.of(e.Failure)))
    assert "tape" in bench.core.of(e.Failure)[0].reason
    assert bench.core.of(e.SaveFailed) == []
    assert bench.store.calls == []
    bench.workers.shutdown()


async def test_settling_waits_for_a_running_save(bench: Bench) -> None:
    bench.store.gate.clear()
    order(bench, c.SaveCheckpoint(1, c.SaveKind.PERIODIC, object()), c.Finish(0, ""))
    threading.Timer(0.05, bench.store.gate.set).start()
    await bench.actor.settle()
    assert bench.store.calls == [("save", True, False)]
