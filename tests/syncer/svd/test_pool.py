"""The pool with real worker processes: ends well, or is poisoned within its deadlines (N28-N34)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from syncer.svd.flatten import flatten_matrix
from syncer.svd.pool import PoolClosed, PoolPoisoned, PoolSettings, SvdPool

FAKE = Path(__file__).with_name("fake_worker.py")
BOUND_S = 20.0
"""Far more than any deadline below, far less than a hang."""


class Pools:
    """Builds pools and closes them at the end of the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[SvdPool] = []
        self.faults: list[str] = []

    def __call__(
        self,
        behaviour: str | None = None,
        *,
        devices: tuple[str, ...] = ("cpu",),
        capacity: int = 16,
        startup_s: float = 60,
        request_s: float = 60,
        drain_s: float = 60,
    ) -> SvdPool:
        """A pool of real workers, or of fake ones that behave as told."""
        python = sys.executable
        if behaviour is not None:
            script = self._directory / "python"
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {behaviour} "$@"\n')
            script.chmod(0o755)
            python = str(script)
        settings = PoolSettings(devices, python, capacity, startup_s, request_s, drain_s)
        pool = SvdPool(settings, self.faults.append)
        self._open.append(pool)
        return pool

    def close(self) -> None:
        for pool in self._open:
            pool.close()
            assert all(not alive(pid) for pid in pool.worker_pids)


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def poisoned(work: Callable[[], object]) -> str:
    """The fault that `work` ends with, in bounded time."""
    start = time.monotonic()
    with pytest.raises(PoolPoisoned) as caught:
        work()
    assert time.monotonic() - start < BOUND_S
    return str(caught.value)


ONES = [torch.ones(2, 2)]


def test_real_workers_flatten_in_order(pools: Pools) -> None:
    """N28, N32: results land at their places, whatever worker was first."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1), (30, 7), (7, 30), (64, 64), (5, 1), (200, 100), (3, 3)]
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    pool = pools(capacity=2)
    pool.start()
    for _ in range(2):
        for matrix, flat in zip(matrices, pool.flatten(matrices), strict=True):
            assert torch.allclose(flat, flatten_matrix(matrix), rtol=1e-6, atol=1e-6)
    assert pool.flatten([]) == []
    pool.drain()
    pool.drain()
    with pytest.raises(PoolClosed):
        pool.flatten(ONES)
    assert pools.faults == []


def test_a_real_worker_killed_while_idle(pools: Pools) -> None:
    """Noticed at once, not at the next request; every later call repeats the first fault (N33)."""
    pool = pools()
    pool.start()
    os.kill(pool.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: pools.faults)
    assert "SIGKILL" in pools.faults[0]
    assert poisoned(lambda: pool.flatten(ONES)) == pools.faults[0]
    assert poisoned(pool.drain) == pools.faults[0] == pool.poison


def test_a_real_worker_stopped_in_a_request(pools: Pools) -> None:
    """SIGSTOP: found by the request deadline, and even a stopped process is ended."""
    pool = pools(request_s=1)
    pool.start()
    os.kill(pool.worker_pids[0], signal.SIGSTOP)
    # More than a pipe holds: the sender is blocked too.
    assert "within 1 s" in poisoned(lambda: pool.flatten([torch.randn(400, 400)]))


def test_a_real_worker_killed_in_a_request(pools: Pools) -> None:
    pool = pools()
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(pool.flatten, [torch.randn(1500, 1500)])
        wait_for(lambda: pool.admitted)
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        assert "SIGKILL" in poisoned(work.result)


@pytest.mark.parametrize(
    ("behaviour", "fault"),
    [
        ("exit-at-start", "exited with code 3"),
        ("garbage-at-start", "magic"),
        ("wrong-probe", "probe"),
        ("silent-at-start", "did not start within 1 s"),
        ("stop-at-start", "did not start within 1 s"),
    ],
)
def test_a_bad_start(pools: Pools, behaviour: str, fault: str) -> None:
    pool = pools(behaviour, startup_s=1 if "within" in fault else 60)
    assert fault in poisoned(pool.start)
    assert poisoned(lambda: pool.flatten(ONES)) == pool.poison


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    pool = SvdPool(PoolSettings(("cpu",), str(tmp_path / "nothing"), 1, 5, 5, 5))
    assert "can't be started" in poisoned(pool.start)
    pool.close()


def test_one_bad_worker_of_two_fails_the_start(pools: Pools) -> None:
    """N31: the startup deadline is for all children."""
    pool = pools("silent-at-start-on-b", devices=("a", "b"), startup_s=1)
    assert "did not start" in poisoned(pool.start)


@pytest.mark.parametrize(
    ("behaviour", "fault"),
    [
        ("exit", "exited with code 4"),
        ("kill", "killed by SIGKILL"),
        ("garbage", "magic"),
        ("wrong-id", "answered request 99"),
        ("wrong-shape", "answered a matrix of 2 x 2 with one of 1 x 4"),
        ("wrong-length", "bytes"),
        ("short", "after"),
        ("nan", "not finite"),
        ("error", "error 6: it went wrong"),
        ("long-error", "diagnostic of 70000 bytes"),
        ("hang", "not answered within 1 s"),
    ],
)
def test_a_bad_answer(pools: Pools, behaviour: str, fault: str) -> None:
    """N30, N33: any of these poisons; other work fails with the same words."""
    pool = pools(behaviour, request_s=1 if behaviour == "hang" else 60)
    pool.start()
    assert fault in poisoned(lambda: pool.flatten(ONES))
    assert pools.faults == [pool.poison]
    assert poisoned(lambda: pool.flatten(ONES)) == pool.poison
    assert poisoned(pool.drain) == pool.poison
    wait_for(lambda: not any(map(running, pool.worker_pids)))


def running(pid: int) -> bool:
    """Whether the process still executes; a dead child may not have been waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_fault_fails_all_pending_work(pools: Pools) -> None:
    """N33: queued work, and work that waits for capacity, fails at once."""
    pool = pools("hang-then-exit", capacity=2)
    pool.start()
    with ThreadPoolExecutor(5) as threads:
        work = [threads.submit(pool.flatten, ONES * 2) for _ in range(5)]
        for future in work:
            assert "exited" in poisoned(future.result)


def test_a_hang_in_drain(pools: Pools) -> None:
    pool = pools("hang", drain_s=1)
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(pool.flatten, ONES)
        wait_for(lambda: pool.admitted)
        assert "not drained within 1 s" in poisoned(pool.drain)
        assert "not drained" in poisoned(work.result)


def test_a_crash_in_drain(pools: Pools) -> None:
    pool = pools("hang-then-exit")
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(pool.flatten, ONES)
        wait_for(lambda: pool.admitted)
        assert "exited with code 4" in poisoned(pool.drain)
        assert "exited with code 4" in poisoned(work.result)


def test_drain_waits_for_work_and_closes_admissions(pools: Pools) -> None:
    pool = pools("slow")
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(pool.flatten, ONES)
        wait_for(lambda: pool.admitted)
        pool.drain()
        assert torch.equal(work.result(BOUND_S)[0], ONES[0])


def test_capacity_counts_queued_and_running(pools: Pools) -> None:
    """N32: the worker, which counts, never sees a third admitted matrix before one is done."""
    pool = pools("slow", capacity=2)
    pool.start()
    most = 0
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(pool.flatten, ONES * 6)
        while not work.done():
            most = max(most, pool.admitted)
        assert len(work.result()) == 6
    assert most == 2


def test_waiting_for_capacity_counts_against_the_deadline(pools: Pools) -> None:
    """N31: fixed at submission."""
    pool = pools("hang", capacity=1, request_s=1)
    pool.start()
    assert "within 1 s" in poisoned(lambda: pool.flatten(ONES * 3))


def test_close_ends_pending_work(pools: Pools) -> None:
    pool = pools("hang")
    pool.start()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(pool.flatten, ONES)
        wait_for(lambda: pool.admitted)
        pool.close()
        with pytest.raises(PoolClosed):
            work.result(BOUND_S)
    pool.close()
    assert pools.faults == []


def test_workers_ignore_a_ctrl_c_on_the_terminal(pools: Pools) -> None:
    """C80: they are not in the foreground group; the syncer needs them to finalize."""
    pool = pools("echo")
    pool.start()
    assert os.getpgid(pool.worker_pids[0]) != os.getpgid(0)


def test_two_devices_work_at_the_same_time(pools: Pools, tmp_path: Path) -> None:
    pool = pools(f"meet:{tmp_path}", devices=("a", "b"))
    pool.start()
    for flat in pool.flatten(ONES * 2):
        assert torch.equal(flat, ONES[0])
