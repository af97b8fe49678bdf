"""How fast messages move through the product's full stack, next to raw sockets in the same run.

Two processes on loopback, one message at a time: the sender queues a tensor message and waits for
the receiver's short answer; the raw loops do the same with `sendall` and `recv_into` over as many
sockets. Everything that the product does is in its time: cutting, checking, reassembly into fresh
memory, the scan for non-finite values, hand-over to the owner.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from benchmarks.report import (
    MIB,
    Report,
    benchmark_parser,
    current_rss,
    median,
    peak_rss,
    reset_peak_rss,
)
from wire import loop
from wire.accept import Acceptor, Newcomer
from wire.dial import dial
from wire.dtypes import DType
from wire.frames import SLICE_BYTES
from wire.group import Group, SendCounters
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.messages import (
    Broadcast,
    Buffer,
    Heartbeat,
    Hello,
    Message,
    PullRequest,
    PushFragment,
    decode_hello,
)

HOST = "127.0.0.1"
FLOAT = 4


class Task(NamedTuple):
    """What the far process does next: one transfer set-up, from its side."""

    kind: str
    size: int
    streams: int
    repeats: int


class Waiter:
    """A sink that hands the next message to whoever waits for it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Message] = asyncio.Queue()
        self.closed = asyncio.Event()

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """Queue it."""
        self.queue.put_nowait(message)

    def on_closed(self, group: Group, reason: str) -> None:
        """The peer has finished."""
        self.closed.set()

    def on_bad_budget(self, group: Group) -> None:
        """Never asked for."""


class Door:
    """Accepts everyone."""

    def __init__(self) -> None:
        self.sink = Waiter()
        self.groups: asyncio.Queue[Group] = asyncio.Queue()

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        """Adopt at once."""
        self.groups.put_nowait(newcomer.adopt(decode_hello(payload, 256), self.sink))


def layout_of(size: int) -> NumericLayout:
    """One fragment of `size` bytes in f32."""
    return NumericLayout((numeric_fragment(MergeMode.RDA, [size // FLOAT]),))


def push_of(tensor: Buffer) -> PushFragment:
    """A PUSH of learner 0."""
    return PushFragment(0, 0, 1, 1, 0, 1, 1, 1, tensor)


# -- the far process: the syncer's side --------------------------------------------------------


def far_main(pipe: Connection) -> None:
    """Serve tasks until None comes."""
    while (task := pipe.recv()) is not None:
        if task.kind.startswith("raw"):
            _far_raw(pipe, task)
        elif task.kind == "streamreader":
            asyncio.run(_far_streamreader(pipe, task))
        else:
            loop.run(_far_product(pipe, task))


def _far_raw(pipe: Connection, task: Task) -> None:
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sockets = [listener.accept()[0] for _ in range(task.streams)]
    # Page-aligned and touched: some processors copy to other addresses at a third of the speed.
    target = memoryview(mmap.mmap(-1, task.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    target[:] = bytes(task.size)
    for sock in sockets:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(task.repeats):
        _in_turn_or_threads(task, sockets, target, _receive_all)
        sockets[0].sendall(b"!")
    for sock in sockets:
        sock.close()


async def _far_streamreader(pipe: Connection, task: Task) -> None:
    pairs: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda reader, writer: pairs.put_nowait((reader, writer)), HOST, 0
    )
    pipe.send(server.sockets[0].getsockname()[1])
    sockets = [await pairs.get() for _ in range(task.streams)]
    for _ in range(task.repeats):
        parts = await asyncio.gather(
            *(_read_slices(reader, task, index) for index, (reader, _) in enumerate(sockets))
        )
        sockets[0][1].write(b"!")
        del parts
    server.close()


async def _read_slices(reader: asyncio.StreamReader, task: Task, index: int) -> list[bytes]:
    mine = range(index * SLICE_BYTES, task.size, task.streams * SLICE_BYTES)
    return [await reader.readexactly(min(SLICE_BYTES, task.size - at)) for at in mine]


async def _far_product(pipe: Connection, task: Task) -> None:
    door = Door()
    with ThreadPoolExecutor(2) as executor:
        acceptor = Acceptor(door, learners=256, executor=executor)
        _, port = await acceptor.listen(HOST, 0)
        pipe.send(port)
        group = await door.groups.get()
        if task.kind == "push":
            before = current_rss()
            reset_peak_rss()
            for _ in range(task.repeats):
                await door.sink.queue.get()
                group.send_control(PullRequest(0, 1, 1))
            pipe.send(peak_rss() - before)
        elif task.kind == "bcast":
            values = np.ones(task.size // FLOAT, np.float32).data.cast("B")
            for _ in range(task.repeats):
                await door.sink.queue.get()
                group.send_bulk(0, Broadcast(0, 1, values))
            await door.sink.queue.get()
        else:
            for _ in range(task.repeats):
                await door.sink.queue.get()
                group.send_control(PullRequest(0, 1, 1))
        await door.sink.closed.wait()
        acceptor.close()


# -- this process: the learner's side ----------------------------------------------------------


class Bench:
    """Runs tasks against the far process; each returns the seconds of every repeat."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.last_peak = 0

    def raw(self, task: Task) -> list[float]:
        """Blocking sockets, one thread or one per socket."""
        self._pipe.send(task)
        port = self._pipe.recv()
        sockets = [socket.create_connection((HOST, port)) for _ in range(task.streams)]
        source = np.ones(task.size // FLOAT, np.float32).data.cast("B")
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(task.repeats):
            start = time.perf_counter()
            _in_turn_or_threads(task, sockets, source, socket.socket.sendall)
            sockets[0].recv(1)
            seconds.append(time.perf_counter() - start)
        for sock in sockets:
            sock.close()
        return seconds

    def product(self, task: Task) -> list[float]:
        """The product's stack; for `push` the far side adds its peak memory to `last_peak`."""
        self._pipe.send(task)
        port = self._pipe.recv()
        seconds = loop.run(_near_product(port, task))
        if task.kind == "push":
            self.last_peak = int(self._pipe.recv())
        return seconds


async def _near_product(port: int, task: Task) -> list[float]:
    sink = Waiter()
    seconds = []
    layout = layout_of(task.size)
    fingerprint = bytes(32)
    generation = secrets.randbits(64) | 1
    hello = Hello(0, generation, DType.F32, layout, fingerprint, fingerprint, None, task.streams)
    values = np.ones(task.size // FLOAT, np.float32).data.cast("B")
    with ThreadPoolExecutor(2) as executor:
        group = await dial(HOST, port, hello, sink=sink, executor=executor, counters=SendCounters())
        for _ in range(task.repeats):
            start = time.perf_counter()
            if task.kind == "push":
                group.send_bulk(0, push_of(values))
            else:
                group.send_control(Heartbeat(0, 1))
            await sink.queue.get()
            seconds.append(time.perf_counter() - start)
        if task.kind == "bcast":
            group.send_control(Heartbeat(0, 1))
        await group.flush()
        group.close()
        await group.wait_closed()
    return seconds


Transfer = Callable[[socket.socket, memoryview], None]


def _in_turn_or_threads(
    task: Task, sockets: list[socket.socket], memory: memoryview, move: Transfer
) -> None:
    """Move 4 MiB slices, slice i over socket i mod S: in turn, or one thread per socket."""
    slices = [memory[at : at + SLICE_BYTES] for at in range(0, task.size, SLICE_BYTES)]
    if task.kind == "raw":
        for index, piece in enumerate(slices):
            move(sockets[index % len(sockets)], piece)
        return

    def own(index: int) -> None:
        for piece in slices[index :: len(sockets)]:
            move(sockets[index], piece)

    threads = [threading.Thread(target=own, args=(index,)) for index in range(len(sockets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive_all(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[sock.recv_into(memory) :]


class Case(NamedTuple):
    """One row: a way of the product against the same bytes over as many bare sockets."""

    metric: str
    kind: str
    streams: int


CASES = (
    Case("push_s4_vs_raw", "push", 4),
    Case("push_s1_vs_raw", "push", 1),
    Case("bcast_s4_vs_raw", "bcast", 4),
)
WARM = 2
"""Repeats of a connection that do not count: windows open, memory is touched for the first time."""


def compare(bench: Bench, report: Report, case: Case, size: int, rounds: int) -> None:
    """Product and bare sockets in turn, several rounds, so that both see the same machine."""
    seconds: dict[str, list[float]] = {"raw": [], "raw-threads": [], case.kind: []}
    peaks = []
    for _ in range(rounds):
        for kind, taken in seconds.items():
            task = Task(kind, size, case.streams, WARM + 5)
            raw = kind.startswith("raw")
            taken.extend((bench.raw(task) if raw else bench.product(task))[WARM:])
        peaks.append(bench.last_peak)
    turn, threads = median(seconds["raw"]), median(seconds["raw-threads"])
    best = min(turn, threads)
    product = median(seconds[case.kind])
    rates = (
        f"{size / product / 1e9:.2f} of {size / best / 1e9:.2f} GB/s "
        f"(one thread {size / turn / 1e9:.2f}, a thread per socket {size / threads / 1e9:.2f})"
    )
    report.add(case.metric, best / product, "ratio", rates)
    if case.metric == "push_s4_vs_raw":
        allowed = f"allowed: 1.15 + 64 MiB, here {1.15 + 64 * MIB / size:.2f}"
        report.add("receiver_peak_vs_message", max(peaks) / size, "ratio", allowed)
        task = Task("streamreader", size, case.streams, WARM + 3)
        readers = median(bench.raw(task)[WARM:])
        report.add("push_s4_vs_streamreader", readers / product, "ratio", "asyncio.StreamReader")


def small_frames(bench: Bench, report: Report, repeats: int) -> None:
    """HEARTBEAT out, PULL back."""
    seconds = bench.product(Task("ping", FLOAT, 0, repeats))
    report.add("control_round_trip", median(seconds[repeats // 10 :]) * 1e6, "us", "p50")


def main() -> None:
    """Measure and report."""
    options = benchmark_parser(__doc__ or "").parse_args()
    size = (64 if options.quick else 256) * MIB
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=far_main, args=(far,), daemon=True)
    process.start()
    far.close()
    report = Report("wire")
    bench = Bench(near)
    for case in CASES:
        compare(bench, report, case, size, rounds=2 if options.quick else 3)
    small_frames(bench, report, repeats=2000)
    near.send(None)
    process.join()
    report.finish(options.json)


if __name__ == "__main__":
    main()
