"""L50-L52: a group that was killed goes on from the saves of one step as if nothing had been.

Real processes of both programs in blocking mode, whose rounds are a function of the steps alone:
one run is left alone; in the other a learner is killed with SIGKILL after a few steps more than the
last save, the rest of the group follows it, and the group is resumed from that save.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import torch
from safetensors.torch import load_file

from checkpoint.comparison import compare_files
from tests.system.client import WAIT, Syncer
from tests.system.zygote import zygote

FRAGMENTS = 3
PATCH = "tests.system.noisy_task"


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


class Group:
    """A syncer and all its learners in one folder."""

    def __init__(self, folder: Path, learners: int, steps: int, every: int) -> None:
        self.folder = folder
        self.learners = learners
        self._every = every
        self._rounds = FRAGMENTS * steps
        self._pids: dict[int, int] = {}
        self.syncer: Syncer | None = None
        folder.mkdir()

    def start(self, saved: int, *, resume: bool = False, pause: tuple[int, int] | None = None):
        """All processes; they save every `saved` steps. `pause`: a learner and its last step."""
        self.syncer = Syncer(
            self.folder,
            f"--quorum={self.learners}",
            f"--learners={self.learners}",
            f"--total-steps={self._rounds // self._every}",
            f"--checkpoint-every={FRAGMENTS * saved // self._every}",
            *(["--resume"] if resume else []),
        )
        for number in range(self.learners):
            environment = {}
            if pause is not None and pause[0] == number:
                environment["NOISY_PAUSE"] = f"{pause[1]}:{self.paused}"
            self.start_learner(number, saved, self.state(number), environment)

    def start_learner(self, number: int, saved: int, state: Path, environment=None) -> int:
        assert self.syncer is not None
        self._pids[number] = zygote().start(
            [
                f"--connect=127.0.0.1:{self.syncer.port}",
                f"--learner-id={number}",
                f"--sync-every={self._every}",
                f"--fragments={FRAGMENTS}",
                f"--state-dir={state}",
                f"--state-every-steps={saved}",
                f"--output-dir={self.out(number)}",
                *("--task=noisy", "--wire-dtype=f32", "--streams=1"),
            ],
            self.folder,
            self.folder / "learners.txt",
            self.folder / "learners.txt",
            patch=PATCH,
            program="yeto-learner",
            environment=environment,
        )
        return self._pids[number]

    @property
    def paused(self) -> Path:
        return self.folder / "paused"

    def state(self, number: int) -> Path:
        return self.folder / f"state-{number}"

    def out(self, number: int) -> Path:
        return self.folder / f"out-{number}"

    def said(self) -> str:
        return (self.folder / "learners.txt").read_text()

    def kill(self, number: int) -> None:
        """SIGKILL, and see it die of that; harmless to one that has ended."""
        pid = self._pids.pop(number)
        if zygote().poll(pid) is None:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: zygote().poll(pid) is not None, "a killed learner ends")

    def kill_all(self) -> None:
        for number in list(self._pids):
            self.kill(number)
        if self.syncer is not None:
            self.syncer.kill()

    def finish(self) -> None:
        for number in range(self.learners):
            code = self.exit_code(number)
            assert code == 0, f"learner {number}: {code}\n{self.said()}"
        assert self.syncer is not None
        assert self.syncer.wait() == 0, self.syncer.stderr

    def exit_code(self, number: int) -> int | None:
        pid = self._pids[number]
        wait_for(lambda: zygote().poll(pid) is not None, self.said())
        return zygote().poll(pid)


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.kill_all()


def same_tensors(ours: Path, theirs: Path, *prefixes: str) -> None:
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    checked = [name for name in one if name.startswith(prefixes)]
    assert checked
    for name in checked:
        assert torch.equal(one[name], other[name]), name


def assert_same_end(whole: Group, broken: Group, steps: int) -> None:
    """Parameters, momentum, and every learner's optimizer and RNG, bit by bit."""
    assert whole.syncer is not None
    assert broken.syncer is not None
    difference = compare_files(whole.syncer.checkpoint, broken.syncer.checkpoint)
    assert difference["fragments"]
    assert not any(fragment["differs"] for fragment in difference["fragments"])
    for number in range(whole.learners):
        same_tensors(
            whole.out(number) / "model.safetensors", broken.out(number) / "model.safetensors", ""
        )
        ours, theirs = (group.state(number) / f"step-{steps}" for group in (whole, broken))
        same_tensors(ours / "tensors.safetensors", theirs / "tensors.safetensors", "optimizer/")
        one, other = (
            msgpack.unpackb((path / "state.msgpack").read_bytes(), strict_map_key=False)
            for path in (ours, theirs)
        )
        for part in ("rng", "optimizer", "data", "local_step", "units"):
            assert one[part] == other[part], part
        assert one["local_step"] == steps
        assert one["rng"]["torch"] != b""


@pytest.mark.parametrize(
    ("learners", "steps", "every", "saved", "killed_after"),
    [
        pytest.param(2, 16, 4, 8, 11, id="short"),
        pytest.param(4, 128, 8, 64, 75, id="four-learners", marks=pytest.mark.slow),
    ],
)
def test_resumed_from_the_saved_step_of_the_group(
    tmp_path: Path,
    groups: list[Group],
    learners: int,
    steps: int,
    every: int,
    saved: int,
    killed_after: int,
) -> None:
    whole = Group(tmp_path / "whole", learners, steps, every)
    broken = Group(tmp_path / "broken", learners, steps, every)
    groups += [whole, broken]
    victim = learners - 1
    whole.start(saved)
    broken.start(saved, pause=(victim, killed_after))
    wait_for(broken.paused.exists, broken.folder.name)
    for number in range(learners):
        # The others wait at the next boundary for the one that will not come.
        wait_for((broken.state(number) / f"step-{saved}").exists, "the save is on disk")
    broken.kill(victim)
    broken.kill_all()
    for number in range(learners):
        assert [path.name for path in broken.state(number).glob("step-*")] == [f"step-{saved}"]
    whole.finish()

    broken.start(saved, resume=True)
    broken.finish()
    assert broken.said().count(f"continuing at local step {saved} from") == learners
    assert_same_end(whole, broken, steps)

    # L51: the state of one learner is not that of another.
    assert whole.start_learner(0, saved, whole.state(1))
    assert whole.exit_code(0) == 2
    assert "is another learner's: learner id 1, ours is 0" in whole.said()
    results = [json.loads((whole.out(n) / "result.json").read_text()) for n in range(learners)]
    assert [result["local_step"] for result in results] == [steps] * learners
