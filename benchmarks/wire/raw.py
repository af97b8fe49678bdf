"""What the product is compared with: the same bytes without it."""

from __future__ import annotations

import asyncio
import mmap
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.wire.ends import HOST, Setup
from wire.frames import SLICE_BYTES
from wire.stream import LOCAL_SEND_BYTES

Move = Callable[[socket.socket, memoryview], None]
SERVER_NAME = "localhost"


def touched(size: int) -> memoryview:
    """Page-aligned, touched memory: some processors copy to other addresses far slower."""
    memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for at in range(0, size, SLICE_BYTES):
        memory[at : at + SLICE_BYTES] = bytes(min(SLICE_BYTES, size - at))
    return memory


def ones(size: int) -> memoryview:
    """A message of f32 ones."""
    return np.ones(size // 4, np.float32).data.cast("B")


class RawEnd:
    """Blocking sockets: 4 MiB slices, slice i over socket i mod S.

    One thread moves the slices in turn, or each socket has a thread of its own. Several learners
    are served one after the other, or side by side. `tuned` ways have the product's send buffer.
    """

    def __init__(self, setup: Setup, sockets: Sequence[socket.socket], *, near: bool) -> None:
        self._setup = setup
        self._sockets = sockets
        self._near = near
        self._move: Move = send_all if near else receive_all
        self._memory = [ones(setup.size) if near else touched(setup.size)]
        if not near:  # every learner has room of its own
            self._memory += [touched(setup.size) for _ in range(setup.learners - 1)]
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer(self) -> None:
        """Send the message, or receive and answer."""
        if self._setup.kind.endswith("threads"):
            self._in_threads()
        else:
            for _, sock, piece in self._pieces():
                self._move(sock, piece)
        if self._near:
            receive_all(self._sockets[0], memoryview(bytearray(1)))
        else:
            self._sockets[0].sendall(b"!")

    def _pieces(self) -> list[tuple[int, socket.socket, memoryview]]:
        size, streams = self._setup.size, self._setup.streams
        found = []
        for learner in range(self._setup.learners):
            memory = self._memory[learner % len(self._memory)]
            for index, at in enumerate(range(0, size, SLICE_BYTES)):
                number = learner * streams + index % streams
                found.append((number, self._sockets[number], memory[at : at + SLICE_BYTES]))
        return found

    def _in_threads(self) -> None:
        def own(number: int) -> None:
            for owner, sock, piece in self._pieces():
                if owner == number:
                    self._move(sock, piece)

        threads = [
            threading.Thread(target=own, args=(number,)) for number in range(len(self._sockets))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> Mapping[str, float]:
        """Close the sockets."""
        for sock in self._sockets:
            sock.close()
        return {}


def send_all(sock: socket.socket, memory: memoryview) -> None:
    """Hand all of `memory` to the kernel; under TLS too."""
    sock.sendall(memory)


def receive_all(sock: socket.socket, memory: memoryview) -> None:
    """Fill `memory`."""
    while memory:
        memory = memory[sock.recv_into(memory) :]


def accepted(setup: Setup, announce: Callable[[int], None]) -> list[socket.socket]:
    """As many sockets as the other side opens."""
    with socket.create_server((HOST, 0)) as listener:
        announce(listener.getsockname()[1])
        return [listener.accept()[0] for _ in range(setup.streams * setup.learners)]


def connected(setup: Setup, port: int) -> list[socket.socket]:
    """All sockets of the near side."""
    count = setup.streams * setup.learners
    sockets = [socket.create_connection((HOST, port)) for _ in range(count)]
    if setup.kind.startswith("tuned"):
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)
    return sockets


def far_raw(setup: Setup, announce: Callable[[int], None]) -> RawEnd:
    """Receives."""
    return RawEnd(setup, accepted(setup, announce), near=False)


def near_raw(setup: Setup, port: int) -> RawEnd:
    """Sends."""
    return RawEnd(setup, connected(setup, port), near=True)


def far_tls(setup: Setup, announce: Callable[[int], None]) -> RawEnd:
    """Receives under TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    keys = Path(setup.directory)
    context.load_cert_chain(keys / "server.pem", keys / "server-key.pem")
    plain = accepted(setup, announce)
    return RawEnd(setup, [context.wrap_socket(s, server_side=True) for s in plain], near=False)


def near_tls(setup: Setup, port: int) -> RawEnd:
    """Sends under TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(Path(setup.directory) / "ca.pem")
    plain = connected(setup, port)
    sockets = [context.wrap_socket(s, server_hostname=SERVER_NAME) for s in plain]
    return RawEnd(setup, sockets, near=True)


class ReaderEnd:
    """The far end of near_raw with `asyncio.StreamReader`."""

    def __init__(self, setup: Setup, announce: Callable[[int], None]) -> None:
        self._setup = setup
        self._runner = asyncio.Runner()
        self._runner.run(self._accept(announce))

    async def _accept(self, announce: Callable[[int], None]) -> None:
        pairs: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_server(lambda *pair: pairs.put_nowait(pair), HOST, 0)
        announce(server.sockets[0].getsockname()[1])
        self._pairs = [await pairs.get() for _ in range(self._setup.streams)]
        server.close()

    def transfer(self) -> None:
        """Receive and answer."""
        self._runner.run(self._receive())

    async def _receive(self) -> None:
        readers = [reader for reader, _ in self._pairs]
        await asyncio.gather(*(self._slices(*numbered) for numbered in enumerate(readers)))
        self._pairs[0][1].write(b"!")
        await self._pairs[0][1].drain()

    async def _slices(self, index: int, reader: asyncio.StreamReader) -> list[bytes]:
        size = self._setup.size
        mine = range(index * SLICE_BYTES, size, self._setup.streams * SLICE_BYTES)
        return [await reader.readexactly(min(SLICE_BYTES, size - at)) for at in mine]

    def close(self) -> Mapping[str, float]:
        """Close the sockets."""
        for _, writer in self._pairs:
            writer.transport.abort()
        self._runner.close()
        return {}


class GlooEnd:
    """A torch.distributed broadcast of the same bytes between two processes."""

    def __init__(self, setup: Setup, rank: int, port: int) -> None:
        self._tensor = torch.ones(setup.size // 4)
        address = f"tcp://{HOST}:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def transfer(self) -> None:
        """From the far process to this one, as a broadcast goes."""
        dist.broadcast(self._tensor, src=1)
        dist.barrier()

    def close(self) -> Mapping[str, float]:
        """Leave the process group."""
        dist.destroy_process_group()
        return {}


def far_gloo(setup: Setup, announce: Callable[[int], None]) -> GlooEnd:
    """The source."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    announce(port)
    return GlooEnd(setup, 1, port)


def near_gloo(setup: Setup, port: int) -> GlooEnd:
    """The receiver, which also runs the store."""
    return GlooEnd(setup, 0, port)
