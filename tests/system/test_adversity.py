"""Learners that die, hang, blink or crowd in, and disks that fill: the run goes on (issue: rounds)."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from syncer.tape import EventRecord, read_commits, read_tape
from tests.system.client import Client, Syncer, drive, named_layout
from wire.layout import MergeMode
from wire.messages import Broadcast, PullRequest

Start = Callable[..., Syncer]
Join = Callable[..., Client]
INIT = [np.arange(6, dtype=np.float32), np.full(4, -1.0, np.float32)]
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")


def open_sockets(pid: int) -> int:
    """Sockets of a process."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except OSError:
            continue
    return count


def test_a_learner_that_hangs_is_missed_after_its_heartbeat_timeout(
    syncer: Start, join: Join
) -> None:
    """W43, C21b: quorum 3 of 3, one is stopped without closing anything."""
    process = syncer("--quorum", "3", "--heartbeat-timeout-s", "1", "--total-steps", "2")
    clients = [join(process, number) for number in range(3)]
    clients[0].init(INIT)
    hung = clients.pop()
    hung.expect(PullRequest)
    hung.heartbeat()
    start = time.monotonic()
    drive(clients, until=lambda: any(client.versions.get(0, 0) >= 1 for client in clients))
    assert time.monotonic() - start < 1 + 2 + 1
    drive(clients)
    assert process.wait() == 0


@needs_proc
def test_fifty_reconnects_a_second_lose_no_round_and_no_descriptor(
    syncer: Start, join: Join
) -> None:
    """C19: every connection is a new generation of one id."""
    process = syncer("--quorum", "2", "--grace-ms", "0", "--pipeline", "2")
    steady = [join(process, number) for number in range(2)]
    steady[0].init(INIT)
    drive(steady, until=lambda: steady[0].versions.get(1, 0) >= 2)
    before = open_sockets(process.pid)
    end = time.monotonic() + 1.5
    count = 0
    while time.monotonic() < end:
        blinking = Client(process.port, 2, streams=1)
        version = steady[0].versions[0]
        drive(steady, until=lambda: steady[0].versions[0] > version)  # noqa: B023
        blinking.close()
        count += 1
    assert count >= 10
    deadline = time.monotonic() + 5
    while open_sockets(process.pid) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert open_sockets(process.pid) <= before
    process.signal()
    drive(steady)
    assert process.wait() == 0
    steps = [record.step for record in read_commits(process.tape)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_superseded_generation_may_finish_but_gets_no_new_work(syncer: Start, join: Join) -> None:
    """C19: its ERROR comes only after the stall timeout, when no open attempt needs it."""
    process = syncer("--quorum", "1", "--stall-timeout-s", "0.5", "--pipeline", "1")
    old = join(process)
    old.init(INIT)
    pull = old.expect(PullRequest)
    new = join(process)
    new.expect(Broadcast)
    old.push(pull, np.ones(6, np.float32))
    drive([new], until=lambda: new.versions[0] >= 1)
    assert old.until_end().startswith("superseded: ")
    assert new.ended is None
    process.signal()
    drive([new])
    assert process.wait() == 0
    (record, *_) = read_commits(process.tape)
    assert record.responders[0].generation == old.generation


def test_any_order_of_arrival_gives_the_same_bits(
    syncer: Start, join: Join, tmp_path: Path
) -> None:
    """N2, N27: three learners whose pushes come in another order each time."""
    random = np.random.default_rng(5)
    deltas = {
        (learner, fragment): random.standard_normal(size).astype(np.float32)
        for learner in range(3)
        for fragment, size in enumerate((6, 4))
    }
    files = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        process = syncer("--quorum", "3", "--total-steps", "4", "--checkpoint-every", "1")
        clients = [join(process, number) for number in range(3)]
        clients[0].init(INIT)
        for step in range(1, 5):
            pulls = {number: clients[number].expect(PullRequest) for number in range(3)}
            for number in order:
                pull = pulls[number]
                assert pull.step == step
                clients[number].push(
                    pull, deltas[number, pull.fragment], base=0, tokens=100 + number
                )
                time.sleep(0.01)
        drive(clients)
        assert process.wait() == 0
        files.append(process.checkpoint.read_bytes())
        for path in tmp_path.glob("state.ckpt*"):
            path.unlink()
    assert files[0] == files[1] == files[2]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_a_full_disk_withholds_commits_until_there_is_room(syncer: Start, join: Join) -> None:
    """C35: gathering goes on, the file at the path stays whole, nothing is broadcast."""
    layout = named_layout((150_000, 4))
    process = syncer(
        *("--quorum", "1", "--checkpoint-every", "1", "--total-steps", "6", "--pipeline", "1")
    )
    client = join(process, layout=layout)
    client.init([np.zeros(150_000, np.float32), np.zeros(4, np.float32)])
    drive([client], until=lambda: client.versions.get(0, 0) >= 1)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1_000_000, hard))
    end = time.monotonic() + 30
    while "File too large" not in process.stderr:
        assert time.monotonic() < end
        client.poll(0.05)
        drive([client], until=lambda: True)
    newest = max(client.versions.values())
    client.poll(0.4)
    drive([client], until=lambda: True)
    assert max(client.versions.values()) == newest
    assert process.checkpoint.stat().st_size > 1_000_000
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    drive([client])
    assert process.wait() == 0
    assert [record.step for record in read_commits(process.tape)] == list(range(1, 7))


def test_crowds_of_strangers_are_borne(syncer: Start, join: Join) -> None:
    """W7, W37: silent sockets, garbage, and a learner that is served all the while."""
    process = syncer("--quorum", "1", "--handshake-timeout-s", "1")
    client = join(process)
    client.init(INIT)
    drive([client], until=lambda: client.versions.get(0, 0) >= 1)
    crowd = [socket.create_connection(("127.0.0.1", process.port)) for _ in range(300)]
    for number, sock in enumerate(crowd):
        if number % 3 == 0:
            sock.sendall(os.urandom(200))
    version = client.versions[0]
    drive([client], until=lambda: client.versions[0] >= version + 20)
    time.sleep(1.2)
    for sock in crowd:
        sock.settimeout(2)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
        sock.close()
    lines = process.stderr.splitlines()
    assert len(lines) < 100  # the log is rate-limited
    process.signal()
    drive([client])
    assert process.wait() == 0


def test_a_hello_of_thousands_of_fragments(syncer: Start, join: Join) -> None:
    """W12: a HELLO too large to be read on the event loop; its run ends like any other."""
    layout = named_layout([1] * 6000, MergeMode.RDA)
    process = syncer("--quorum", "1", "--total-steps", "3", "--pipeline", "3")
    client = join(process, layout=layout)
    client.init([np.ones(1, np.float32)] * 6000)
    drive([client], timeout=30)
    assert client.ended == "SHUTDOWN"
    assert process.wait() == 0
    assert client.manifest is not None
    assert client.manifest.versions[:4] == (1, 2, 3, 0)


def test_a_stopped_syncer_goes_on_where_it_was(syncer: Start, join: Join) -> None:
    """A pause of the whole process (a laptop's lid) costs nobody the connection."""
    process = syncer("--quorum", "1", "--heartbeat-timeout-s", "1", "--stall-timeout-s", "1")
    client = join(process)
    client.init(INIT)
    drive([client], until=lambda: client.versions.get(0, 0) >= 1)
    client.heartbeat()
    process.signal(signal.SIGSTOP)
    time.sleep(1.5)
    client.heartbeat()
    process.signal(signal.SIGCONT)
    version = client.versions[0]
    drive([client], until=lambda: client.versions[0] >= version + 4)
    assert client.ended is None


def test_a_restart_on_the_same_port_finds_its_learners(
    syncer: Start, join: Join, tmp_path: Path
) -> None:
    """W4 (SO_REUSEADDR): a kill leaves no port behind that can't be bound."""
    process = syncer("--quorum", "1", "--checkpoint-every", "1")
    client = join(process)
    client.init(INIT)
    drive([client], until=lambda: client.versions.get(1, 0) >= 2)
    process.kill()
    assert client.until_end() == "eof"
    again = syncer("--quorum", "1", "--checkpoint-every", "1", "--resume", f"--port={process.port}")
    assert again.port == process.port
    second = join(again)
    second.expect(Broadcast)
    resumed = [
        record
        for record in read_tape(again.tape)
        if isinstance(record, EventRecord) and record.event == "resume"
    ]
    assert len(resumed) == 1
