"""Durable local state (L50-L53)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learner.errors import StateMismatch, StateUnreadable
from learner.fragments import Anchor
from learner.parameters import Parameters, find_trainables, specs_of
from learner.partition import partition
from learner.state import STATE_FILE, TENSORS_FILE, Identity, LocalState, StateStore
from learner.trees import load_optimizer, pack, unpack

IDENTITY = Identity(learner_id=3, fingerprint=b"f" * 32, contract=b"c" * 32, dtype="bf16")


class Island:
    """A model with everything that has state."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.model[0].parameters()},
                {"params": self.model[2].parameters(), "lr": 0.1},
            ]
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        trainables = find_trainables(self.model)
        self.parameters = Parameters(trainables, partition(specs_of(trainables), 2))
        self.state = LocalState(self.model, self.parameters, self.optimizer, self.scheduler, self)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.position += 1
            self.optimizer.zero_grad()
            (
                self.model(torch.randn(8, 4)) * float(np.random.rand() + random.random())
            ).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        pack(self.model.state_dict(), out, "model")
        pack(self.optimizer.state_dict(), out, "optimizer")
        return out

    def anchors(self) -> list[Anchor[Tensor] | None]:
        return [Anchor(7, b"d" * 32, torch.arange(float(self.parameters.numels[0])), 3, 30), None]

    def save(self, store: StateStore, step: int) -> None:
        store.save(self.state.snapshot(step, 10 * step, self.anchors(), 0.5), lambda path: None)
        store.wait()


def test_restart_continues_as_if_uninterrupted(tmp_path: Path) -> None:
    """L51: parameters, buffers, moments, schedule, RNG and data position, tensor by tensor."""
    island, store = Island(), StateStore(tmp_path, IDENTITY)
    random.seed(1)
    np.random.seed(2)
    island.train(5)
    island.save(store, 5)
    island.train(4)

    other = Island(seed=99)
    other.train(1)
    saved = store.load()
    assert saved is not None
    assert (saved.local_step, saved.units) == (5, 50)
    (anchor,) = saved.anchors.values()
    assert (anchor.version, anchor.digest, anchor.local_step, anchor.units) == (7, b"d" * 32, 3, 30)
    assert torch.equal(anchor.values, torch.arange(float(island.parameters.numels[0])))
    other.state.restore(saved)
    other.train(4)
    assert other.position == island.position == 9
    assert other.scheduler.state_dict() == island.scheduler.state_dict()
    ours, theirs = other.tensors(), island.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    store.close()


def test_l50_damaged_saves_do_not_crowd_out_the_good_ones(tmp_path: Path) -> None:
    """L50, L51: later directories that do not verify are none of the two that are kept."""
    island, store = Island(), StateStore(tmp_path, IDENTITY)
    for step in (1, 2):
        island.save(store, step)
    for step in (5, 9):
        shutil.copytree(tmp_path / "step-2", tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / TENSORS_FILE).write_bytes(b"torn")
    store.close()
    again = StateStore(tmp_path, IDENTITY)
    found = again.load()
    assert found is not None
    assert found.local_step == 2
    kept = []
    for step in (3, 4, 6, 9, 10):
        island.save(again, step)
        kept.append(again.steps())
        fresh = StateStore(tmp_path, IDENTITY).load()
        assert fresh is not None
        assert fresh.local_step == step
    assert kept == [[2, 3, 5, 9], [3, 4, 5, 9], [4, 6, 9], [6, 9], [9, 10]]


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".step-7.tmp").mkdir()
    (tmp_path / ".step-7.tmp" / TENSORS_FILE).write_bytes(b"half")
    island, store = Island(), StateStore(tmp_path, IDENTITY)
    island.save(store, 8)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-8"]


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    """L50."""
    island, store = Island(), StateStore(tmp_path, IDENTITY)
    for step in (9, 10, 100):
        island.save(store, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-100"]
    assert store.load().local_step == 100


@pytest.mark.parametrize("file", [TENSORS_FILE, STATE_FILE])
def test_the_newest_that_verifies_is_loaded(tmp_path: Path, file: str, caplog) -> None:
    """L51: a flipped bit or a missing file falls back to the save before; all bad is an error."""
    island, store = Island(), StateStore(tmp_path, IDENTITY)
    island.save(store, 1)
    island.save(store, 2)
    damaged = tmp_path / "step-2" / file
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    if file == STATE_FILE:
        data = data[:20]
    damaged.write_bytes(data)
    assert store.load().local_step == 1
    assert "step-2 does not verify" in caplog.text
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(StateUnreadable, match="move the directory away"):
        store.load()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"learner_id": 4}, "learner id 3, ours is 4"),
        ({"fingerprint": b"x" * 32}, "layout fingerprint"),
        ({"contract": b"x" * 32}, "session contract"),
        ({"dtype": "q4"}, "wire dtype bf16, ours is q4"),
    ],
)
def test_another_learners_state_is_refused(tmp_path: Path, change, text) -> None:
    """L51, exit 2."""
    Island().save(StateStore(tmp_path, IDENTITY), 1)
    fields = {name: getattr(IDENTITY, name) for name in IDENTITY.__slots__}
    with pytest.raises(StateMismatch, match=text) as refused:
        StateStore(tmp_path, Identity(**{**fields, **change})).load()
    assert refused.value.exit_code == 2


def test_nothing_there_is_no_state(tmp_path: Path) -> None:
    assert StateStore(tmp_path / "missing", IDENTITY).load() is None
    assert StateStore(tmp_path, IDENTITY).load() is None


def test_a_crash_while_writing_leaves_the_old_save(tmp_path: Path) -> None:
    """L50: only complete directories have the name that is looked for."""
    island, store = Island(), StateStore(tmp_path, IDENTITY)
    island.save(store, 1)
    (tmp_path / ".step-2.tmp").mkdir()
    (tmp_path / ".step-2.tmp" / TENSORS_FILE).write_bytes(b"half")
    assert store.load().local_step == 1
    island.save(store, 2)
    assert store.load().local_step == 2


def test_a_failed_save_is_logged_and_training_goes_on(tmp_path: Path, caplog) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    Island().save(StateStore(blocked / "state", IDENTITY), 1)
    assert "was not saved" in caplog.text


def test_snapshot_is_a_copy() -> None:
    """L51: what training changes after the boundary is not in the cut."""
    island = Island()
    island.train(1)
    cut = island.state.snapshot(1, 1, island.anchors(), 0.5)
    before = {name: value.clone() for name, value in cut.tensors.items()}
    island.train(3)
    assert all(torch.equal(before[name], cut.tensors[name]) for name in before)


def test_f32_moments_of_bf16_parameters_keep_their_bits() -> None:
    """torch would cast them to bf16 on load."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    master = torch.tensor([1.2345678, 2.3456789, 3.4567891, 4.5678912])
    optimizer.state[parameter]["momentum_buffer"] = master
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    packed = pack(saved, tensors, "optimizer")
    load_optimizer(optimizer, unpack(packed, tensors))
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], master)


def test_trees_survive() -> None:
    tree = {
        "a": [1, 2.5, None, True, "text", b"bytes", (1, (2,))],
        3: {"big": 2**100, "negative": -(2**70)},
        (1, 2): torch.tensor(4),
    }
    tensors: dict[str, Tensor] = {}
    back = unpack(pack(tree, tensors, "t"), tensors)
    assert torch.equal(back.pop((1, 2)), tree.pop((1, 2)))
    assert back == tree


def test_what_needs_pickle_is_refused_by_its_path() -> None:
    with pytest.raises(TypeError, match="scheduler/fn"):
        pack({"fn": print}, {}, "scheduler")
