"""What learners have seen outlives kill -9, signals in the middle of a save, and a full disk."""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from checkpoint.inspection import Inspection, inspect_file
from syncer.tape import CommitRecord, read_commits, read_tape
from tests.system.client import Client, Syncer, named_layout
from tests.system.held_disk import HELD, HOLD
from wire.messages import Broadcast, PullRequest

Start = Callable[..., Syncer]

LAYOUT = named_layout((3000, 2000, 1000, 500))
INIT = [np.full(fragment.numel, 0.5, np.float32) for fragment in LAYOUT.fragments]
EVERY_COMMIT = ("--checkpoint-every", "1", "--pipeline", "3")
PATCH = "tests.system.held_disk"


@dataclass
class Island:
    """One learner over all its connections: what it has seen, and its newest connection."""

    learner_id: int
    client: Client | None = None
    seen: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    local_step: int = 0

    def connect(self, port: int) -> Client:
        """A new generation; learner 0 sends INIT until it has seen every fragment (L14)."""
        self.client = Client(port, self.learner_id, layout=LAYOUT)
        self.client.local_step = self.local_step
        if self.learner_id == 0 and len(self.seen) < len(LAYOUT):
            self.client.init(INIT)
        return self.client

    def take(self, message: Broadcast) -> None:
        """L24: versions never fall back, and one version has one content, over every restart."""
        data = bytes(message.tensor)
        version, known = self.seen.get(message.fragment, (-1, b""))
        assert message.version >= version, "a broadcast older than what was seen"
        assert message.version > version or data == known, "two contents of one version"
        self.seen[message.fragment] = (message.version, data)

    @property
    def newest(self) -> int:
        """The newest version seen of any fragment; -1 before the first."""
        return max((version for version, _ in self.seen.values()), default=-1)


def connect_all(islands: list[Island], port: int) -> bool:
    """Whether everyone got in; a syncer that dies meanwhile refuses them."""
    try:
        for island in islands:
            island.connect(port)
    except OSError:
        return False
    return True


def train(islands: list[Island], until: Callable[[], bool], timeout: float = 60.0) -> None:
    """Answer every PULL until `until`, or until every connection has ended."""
    end = time.monotonic() + timeout
    while not until():
        owners = {
            sock: island
            for island in islands
            if island.client is not None and island.client.ended is None
            for sock in island.client.sockets
        }
        if not owners:
            return
        assert time.monotonic() < end, "waited too long"
        for sock in select.select(list(owners), [], [], 0.02)[0]:
            serve(owners[sock], sock)


def serve(island: Island, sock: socket.socket) -> None:
    client = island.client
    assert client is not None
    for message in client.feed(sock):
        if isinstance(message, Broadcast):
            island.take(message)
        elif isinstance(message, PullRequest) and message.fragment in client.params:
            answer(island, client, message)
        elif client.has_cut:
            client.acknowledge()


def answer(island: Island, client: Client, pull: PullRequest) -> None:
    numel = LAYOUT.fragments[pull.fragment].numel
    delta = np.full(numel, 0.01 * (island.learner_id + 1), np.float32)
    try:
        client.push(pull, delta)
    except OSError:
        return  # the syncer died under it; what it sent before is still read
    island.local_step = client.local_step


def checked(process: Syncer) -> Inspection:
    """The file at the path is one whole, verified step with a contiguous cut (K5, K10, K15)."""
    found = inspect_file(process.checkpoint)
    assert not list(found.problems())
    assert found.integrity == "verified"
    return found


def step_of(found: Inspection) -> int:
    return found.structure.header.global_step


def kill_at_random_moments(syncer: Start, kills: int, seed: int) -> None:
    """Three of four kills hit a run under way, the others a start."""
    chance = random.Random(seed)
    islands = [Island(number) for number in range(2)]
    options = ("--quorum", "1", *EVERY_COMMIT)
    process = None
    for _ in range(kills):
        resume = ("--resume",) if process is not None and process.checkpoint.exists() else ()
        early = chance.random() < 0.25
        process = syncer(*options, *resume, wait=not early)
        delay = chance.uniform(0, 0.2 if early else 0.1)
        killer = threading.Timer(delay, os.kill, (process.pid, signal.SIGKILL))
        if not early:
            assert connect_all(islands, process.port)
            start = newest_of(islands)
            train(islands, until=lambda start=start: newest_of(islands) > start)
        killer.start()
        train(islands, until=lambda: False)
        killer.join()
        assert process.wait() == -signal.SIGKILL
        if process.checkpoint.exists():
            assert step_of(checked(process)) >= newest_of(islands)
        else:
            assert newest_of(islands) == -1
        close_all(islands)
    assert process is not None
    assert newest_of(islands) >= kills // 2
    finish(syncer, process, islands, options)


def newest_of(islands: list[Island]) -> int:
    """The newest version that anyone has seen."""
    return max(island.newest for island in islands)


def finish(syncer: Start, process: Syncer, islands: list[Island], options: tuple[str, ...]) -> None:
    """The run goes on to its end after the last kill; the tape shows every round once."""
    saved = step_of(checked(process)) if process.checkpoint.exists() else 0
    last = saved + 2 * len(LAYOUT)
    resume = ("--resume",) if process.checkpoint.exists() else ()
    process = syncer(*options, *resume, "--total-steps", str(last), "--mark-final-checkpoint")
    assert connect_all(islands, process.port)
    train(islands, until=lambda: False)
    assert [i.client.ended for i in islands if i.client is not None] == ["SHUTDOWN"] * 2
    assert process.wait() == 0
    found = checked(process)
    assert (step_of(found), found.marked_final) == (last, True)
    check_tape(process, last)
    close_all(islands)


def check_tape(process: Syncer, last: int) -> None:
    """C43: rounds in order, each once; one is missing only where a resume record says so."""
    at = committed = 0
    for record in read_tape(process.tape):
        if isinstance(record, CommitRecord):
            assert record.step == at + 1
            at = committed = record.step
        elif record.event == "resume":
            assert (record.fields["tape_step"] or 0) == committed
            assert record.fields["checkpoint_step"] >= at
            at = record.fields["checkpoint_step"]
    assert at == last


def close_all(islands: list[Island]) -> None:
    for island in islands:
        if island.client is not None:
            island.client.close()
            island.client = None


def test_ten_kills(syncer: Start) -> None:
    """K10, C43: with every commit saved nothing that anyone saw is lost."""
    kill_at_random_moments(syncer, 10, seed=1)


@pytest.mark.slow
def test_a_hundred_kills(syncer: Start) -> None:
    kill_at_random_moments(syncer, 100, seed=2)


# -- signals in the middle of a save -----------------------------------------------------------


def train_into_a_save(syncer: Start, *flags: str) -> tuple[Syncer, list[Island], int]:
    """A run whose newest commit hangs in its save; returns the step at the path."""
    process = syncer("--quorum", "2", *EVERY_COMMIT, *flags, patch=PATCH)
    islands = [Island(number) for number in range(2)]
    assert connect_all(islands, process.port)
    train(islands, until=lambda: all(island.newest >= 5 for island in islands))
    (process.directory / HOLD).touch()
    train(islands, until=(process.directory / HELD).exists)
    return process, islands, step_of(checked(process))


def said(process: Syncer, text: str) -> Callable[[], bool]:
    return lambda: text in process.stderr


def test_sigterm_during_a_save_completes_it_first(syncer: Start) -> None:
    """C80: the commit in its save is part of the final cut, and no broadcast overtakes it."""
    process, islands, at_path = train_into_a_save(syncer)
    process.signal()
    end = time.monotonic() + 0.5
    train(islands, until=lambda: time.monotonic() > end)
    assert process.poll() is None
    assert step_of(checked(process)) == at_path
    assert newest_of(islands) <= at_path
    (process.directory / HOLD).unlink()
    train(islands, until=lambda: False)
    assert process.wait() == 0
    assert [i.client.ended for i in islands if i.client is not None] == ["SHUTDOWN"] * 2
    last = step_of(checked(process))
    assert last > at_path
    check_tape(process, last)
    close_all(islands)


def test_a_second_signal_during_a_save_completes_it_first(syncer: Start) -> None:
    """C81: the write that hangs is finished, then the last committed cut is written, exit 1."""
    process, islands, at_path = train_into_a_save(syncer, "--mark-final-checkpoint")
    process.signal()
    process.signal(signal.SIGINT)
    end = time.monotonic() + 0.3
    train(islands, until=lambda: time.monotonic() > end)
    assert process.poll() is None
    (process.directory / HOLD).unlink()
    assert process.wait() == 1
    found = checked(process)
    assert step_of(found) > at_path
    assert not found.names.marker.exists()
    close_all(islands)


def test_kill_during_a_save_resumes_the_step_before(syncer: Start) -> None:
    """Section 8 of checkpoint.md, before F2: the file at the path is the older step, whole."""
    process, islands, at_path = train_into_a_save(syncer)
    process.kill()
    (process.directory / HOLD).unlink()
    assert step_of(checked(process)) == at_path
    assert newest_of(islands) <= at_path
    close_all(islands)
    finish(syncer, process, islands, ("--quorum", "2", *EVERY_COMMIT))


# -- a full disk -------------------------------------------------------------------------------


@dataclass
class Shortage:
    """A way to make checkpoint writes fail and to end it again."""

    begin: Callable[[Syncer], None]
    end: Callable[[Syncer], None]
    checkpoint: Path
    word: str


def file_size_limit(tmp_path: Path) -> Iterator[Shortage]:
    """Files may not grow past a size that the checkpoint needs and the tape does not."""

    def limit(soft: int) -> Callable[[Syncer], None]:
        return lambda process: resource.prlimit(
            process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY)
        )

    # The smaller fragments still fit, the whole file does not.
    yield Shortage(
        limit(40_000), limit(resource.RLIM_INFINITY), tmp_path / "state.ckpt", "File too large"
    )


def small_file_system(tmp_path: Path) -> Iterator[Shortage]:
    """A file system of a few hundred KiB that something else fills up."""
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ["-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    mounted = subprocess.run(["mount", *flags], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a file system")
    filler = disk / "filler"

    def fill(process: Syncer) -> None:
        with filler.open("wb", buffering=0) as file:
            size = 65536
            while size:
                try:
                    file.write(b"x" * size)
                except OSError:
                    size //= 2

    try:
        yield Shortage(
            fill, lambda process: filler.unlink(), disk / "state.ckpt", "No space left on device"
        )
    finally:
        subprocess.run(["umount", str(disk)], capture_output=True, check=True)


@pytest.fixture(params=[file_size_limit, small_file_system])
def shortage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shortage]:
    yield from request.param(tmp_path)


def start_on(shortage: Shortage, syncer: Start, *flags: str) -> Syncer:
    path = shortage.checkpoint
    process = syncer("--quorum", "2", *EVERY_COMMIT, "--checkpoint-path", str(path), *flags)
    process.checkpoint = path
    return process


def newest_pull(islands: list[Island]) -> int:
    return max(
        message.step
        for island in islands
        if island.client is not None
        for message in island.client.received
        if isinstance(message, PullRequest)
    )


def test_a_full_disk_withholds_commits_and_keeps_gathering(
    syncer: Start, shortage: Shortage
) -> None:
    """C35: nothing is broadcast that is not on the disk, open rounds are answered, the reason and
    the way out are said, and all goes on when there is space."""
    process = start_on(shortage, syncer)
    islands = [Island(number) for number in range(3)]
    assert connect_all(islands[:2], process.port)
    train(islands, until=lambda: all(island.newest >= 5 for island in islands[:2]))
    shortage.begin(process)
    train(islands, until=said(process, "not written"))
    assert shortage.word in process.stderr
    assert "Free space or repair the disk" in process.stderr
    at_path = step_of(checked(process))

    islands[2].connect(process.port)  # whoever joins now gets the durable cut too (C37)
    train(islands, until=lambda: len(islands[2].seen) == len(LAYOUT), timeout=10)
    end = time.monotonic() + 0.3
    train(islands, until=lambda: time.monotonic() > end)
    assert newest_of(islands) <= at_path
    assert step_of(checked(process)) == at_path
    gathered = newest_pull(islands)
    assert gathered > at_path + 1

    shortage.end(process)
    train(islands, until=lambda: newest_of(islands) > gathered)
    assert "written again" in process.stderr
    process.signal()
    train(islands, until=lambda: False)
    assert process.wait() == 0
    check_tape(process, step_of(checked(process)))
    # What was gathered meanwhile counts: no round was tried again.
    assert {record.attempt for record in read_commits(process.tape)} == {1}
    close_all(islands)


def test_a_disk_that_stays_full_ends_the_run_with_the_last_step_intact(
    syncer: Start, tmp_path: Path
) -> None:
    """C35: given up after the quorum timeout; resume goes on from what everyone has seen."""
    shortage = next(file_size_limit(tmp_path))
    process = start_on(shortage, syncer, "--quorum-timeout-s", "2")
    islands = [Island(number) for number in range(2)]
    assert connect_all(islands, process.port)
    train(islands, until=lambda: all(island.newest >= 5 for island in islands))
    shortage.begin(process)
    train(islands, until=lambda: False)
    assert process.wait() == 1
    assert "could not be written" in process.stderr.strip().splitlines()[-1]
    assert newest_of(islands) <= step_of(checked(process))
    close_all(islands)
    finish(syncer, process, islands, ("--quorum", "2", *EVERY_COMMIT))
