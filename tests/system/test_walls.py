"""Strangers who want to cost more than they should, against a real daemon (W6, W7, W9, W41, S13).

Each test floods one syncer in its own way; afterwards the honest learner's round is merged, and
sockets, memory and log lines are within their bounds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.system.client import Client, Syncer, drive, frame, named_layout
from tests.system.security import Certificates, SafeClient
from wire.frames import HELLO_LIMIT
from wire.messages import Broadcast, DataHello, Heartbeat, encode_frame

INIT = [np.arange(6, dtype=np.float32), np.full(4, -1.0, np.float32)]
HANDSHAKE = 1.0
FLAGS = (
    *("--quorum", "1", "--learners", "64", "--handshake-timeout-s", str(HANDSHAKE)),
    *("--grace-ms", "0", "--max-connections", "400"),
)
MIB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Syncer]:
    with Syncer(tmp_path_factory.mktemp("walls"), *FLAGS) as process:
        yield process


@pytest.fixture(scope="module")
def honest(running: Syncer) -> Iterator[Client]:
    client = Client(running.port, 0, streams=1)
    client.init(INIT)
    client.expect(Broadcast)
    yield client
    assert client.ended is None
    client.close()


def served(honest: Client) -> None:
    version = honest.versions[0]
    drive([honest], until=lambda: honest.versions[0] > version)


def resident(running: Syncer) -> int:
    """Bytes of memory of the daemon."""
    for line in Path(f"/proc/{running.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def sockets(running: Syncer) -> int:
    """Open sockets of the daemon."""
    count = 0
    for entry in Path(f"/proc/{running.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += os.readlink(entry).startswith("socket:")
    return count


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def within_bounds(running: Syncer, honest: Client) -> Iterator[None]:
    """W37: what was taken is given back, and the run goes on."""
    served(honest)
    before = sockets(running)
    lines = len(running.stderr.splitlines())
    yield
    served(honest)
    until(lambda: sockets(running) <= before)
    assert len(running.stderr.splitlines()) - lines < 150
    assert running.poll() is None


@contextlib.contextmanager
def crowd(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Sockets of strangers."""
    with contextlib.ExitStack() as closing:
        yield [
            closing.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(count)
        ]


def all_closed(crowd: Sequence[socket.socket], timeout: float = 20.0) -> list[bytes]:
    """What each of them got until its end."""
    got = dict.fromkeys(crowd, b"")
    with selectors.DefaultSelector() as selector:
        for sock in crowd:
            selector.register(sock, selectors.EVENT_READ)
        end = time.monotonic() + timeout
        while selector.get_map():
            assert time.monotonic() < end, f"{len(selector.get_map())} are still open"
            for key, _ in selector.select(0.1):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    data = sock.recv(4096)
                except ConnectionError:
                    data = b""
                got[sock] += data
                if not data:
                    selector.unregister(sock)
    return list(got.values())


def test_slow_first_frames_end_at_the_handshake_timeout(running: Syncer, honest: Client) -> None:
    """W7: a byte now and then buys no time."""
    whole = frame(1, bytes(1000))
    with crowd(running.port, 100) as slow:
        start = time.monotonic()
        for at in range(int(HANDSHAKE / 0.1) - 2):
            for sock in slow:
                sock.sendall(whole[at : at + 1])
            served(honest)
            time.sleep(0.05)
        assert all_closed(slow) == [b""] * 100
        assert time.monotonic() - start < HANDSHAKE + 10


def test_headers_alone_take_no_memory(running: Syncer, honest: Client) -> None:
    """W6: 300 times 16 MiB announced."""
    before = resident(running)
    with crowd(running.port, 300) as strangers:
        for sock in strangers:
            sock.sendall(frame(1, b"", length=HELLO_LIMIT))
        served(honest)
        assert resident(running) - before < 40 * MIB
        assert all_closed(strangers) == [b""] * 300


def test_garbage_is_answered_and_not_logged_line_by_line(running: Syncer) -> None:
    """W41: the ERROR texts are ours; `within_bounds` counts the lines."""
    for _ in range(6):
        with crowd(running.port, 100) as strangers:
            for index, sock in enumerate(strangers):
                noise = os.urandom(64)
                sock.sendall(frame(1, noise) if index % 2 else b"\x00" + noise)
            for answer in all_closed(strangers):
                assert answer[13:].split(b":")[0] in (b"bad-magic", b"version", b"bad-length")
                assert answer[13:].decode().isprintable()


def test_a_storm_of_reconnects(running: Syncer, honest: Client) -> None:
    """C19: each supersedes the one before it, and none is left behind."""
    before = resident(running)
    for _ in range(300):
        client = Client(running.port, 1)
        client.close()
    held = [Client(running.port, 1) for _ in range(100)]
    held[-1].expect(Broadcast)
    served_by_newest = held[-1]
    version = honest.versions[0]
    drive([honest, served_by_newest], until=lambda: honest.versions[0] > version)
    for client in held:
        client.close()
    assert resident(running) - before < 60 * MIB


def test_nobody_takes_a_data_socket_of_another(running: Syncer, honest: Client) -> None:
    """W17: the generation has 64 random bits, a taken index stays taken."""
    guesses = [
        DataHello(0, honest.generation, 0),
        DataHello(0, honest.generation, 1),
        DataHello(0, honest.generation ^ 1, 0),
        DataHello(5, honest.generation, 0),
    ] * 20
    with crowd(running.port, len(guesses)) as thieves:
        for sock, guess in zip(thieves, guesses, strict=True):
            sock.sendall(encode_frame(guess))
        answers = all_closed(thieves)
    codes = [answer[13:].split(b":")[0] for answer in answers]
    assert codes == [b"stream-index", b"stream-index", b"unknown-group", b"unknown-group"] * 20
    assert all(b"%#x" % honest.generation not in answer for answer in answers[2::4])
    assert honest.ended is None


CHUNK = struct.Struct("<QQQ")


def test_64_partial_messages_are_legal_and_the_65th_is_not(running: Syncer, honest: Client) -> None:
    """W29, W30: and nothing of it is left when the group is gone."""
    inner = encode_frame(Heartbeat(2, 7))
    first, rest = inner[:5], inner[5:]
    client = Client(running.port, 2)
    client.expect(Broadcast)
    heads = b"".join(frame(9, CHUNK.pack(i, len(inner), 0) + first) for i in range(64))
    tails = b"".join(frame(9, CHUNK.pack(i, len(inner), 5) + rest) for i in range(64))
    client.send_raw(heads + tails)
    version = honest.versions[0]
    drive([honest, client], until=lambda: honest.versions[0] > version)
    assert client.ended is None
    more = b"".join(frame(9, CHUNK.pack(100 + i, len(inner), 0) + first) for i in range(65))
    client.send_raw(more)
    assert client.until_end().startswith("partial-limit: ")


@pytest.mark.parametrize(
    "slices",
    [
        [(0, 60, 0, 30), (0, 60, 29, 30)],
        [(0, 60, 30, 30), (0, 60, 0, 31)],
        [(0, 60, 0, 30), (0, 61, 30, 30)],
        [(0, 2**62, 0, 30)],
        [(0, 2**64 - 1, 2**64 - 30, 29)],
        [(0, 60, 2**63, 30)],
    ],
)
def test_bad_slices_cost_no_memory(
    running: Syncer, slices: list[tuple[int, int, int, int]]
) -> None:
    """W2, W29: overlaps and huge totals are faults from their headers."""
    before = resident(running)
    client = Client(running.port, 3)
    client.expect(Broadcast)
    for msg_id, total, offset, length in slices:
        client.send_raw(frame(9, CHUNK.pack(msg_id, total, offset) + bytes(length)))
    assert client.until_end().startswith("chunk: ")
    assert resident(running) - before < 20 * MIB
    client.close()


def tiny_fragments(size: int) -> bytes:
    """A HELLO frame of `size` bytes with as many fragments as fit, the last one broken."""
    count = (size - 19 - 66) // 13
    layout = struct.pack("<BIQ", 0, 1, 1) * (count - 1) + struct.pack("<BIQ", 9, 1, 1)
    generation = int.from_bytes(os.urandom(7), "little") + 1
    head = struct.pack("<HIQBI", 4, 9, generation, 1, count)
    return frame(1, head + layout + named_layout().fingerprint * 2 + b"\0\0")


def test_large_hellos_are_read_one_at_a_time_beside_the_run(
    running: Syncer, honest: Client
) -> None:
    """C1, W6: millions of tiny fragments delay nobody, and their bytes wait outside."""
    hello = tiny_fragments(2 * MIB)
    before = resident(running)
    with crowd(running.port, 6) as strangers:
        threads = [threading.Thread(target=_send, args=(sock, hello)) for sock in strangers]
        for thread in threads:
            thread.start()
        slowest = 0.0
        peak = 0
        with selectors.DefaultSelector() as selector:
            for sock in strangers:
                selector.register(sock, selectors.EVENT_READ)
            while len(selector.select(0)) < len(strangers):
                start = time.monotonic()
                served(honest)
                slowest = max(slowest, time.monotonic() - start)
                peak = max(peak, resident(running) - before)
        for thread in threads:
            thread.join()
        for answer in all_closed(strangers):
            assert answer[13:].startswith(b"layout: ")
    assert slowest < 5
    assert peak < 150 * MIB


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)


def test_silent_tls_handshakes_count_and_end(tmp_path: Path) -> None:
    """S13: against the handshake timeout and --max-connections."""
    certificates = Certificates(tmp_path / "keys")
    flags = [*FLAGS[:-1], "12", *certificates.syncer_flags()]
    with Syncer(tmp_path, *flags) as running:
        learner = SafeClient(running.port, 0, tls=certificates.context(certificates.learner(0)))
        learner.init(INIT)
        learner.expect(Broadcast)
        with crowd(running.port, 30) as silent:
            for sock in silent[:5]:
                sock.sendall(b"\x16\x03\x01\x02\x00")
            start = time.monotonic()
            assert all_closed(silent) == [b""] * 30
            assert time.monotonic() - start >= HANDSHAKE * 0.8
        served(learner)
        until(lambda: sockets(running) <= 6)
        learner.close()
