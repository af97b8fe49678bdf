"""Blocking mode: classic DiLoCo, exactly, through a real syncer process (issue of its own).

The single-process reference is Algorithm 1 of Douillard et al. 2023 (DiLoCo): mean of the endpoint
deltas every H steps, then Nesterov with lr 0.7 and momentum 0.9 on the parent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from learner import Learner, LearnerConfig
from learner.config import ConfigError
from learner.errors import LearnerError, SyncTimeout
from tests.learner.scripted import PATIENCE_S, scripted_syncer, values
from wire.dtypes import DType
from wire.messages import InitParams, PushFragment
from wire.tensors import encode

H, ROUNDS, WORKERS = 5, 3, 2


class Worker:
    """A model whose parameters are all averaged, its optimizer, its own data."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential()
        self.model.add_module("embed_in", nn.Linear(6, 8))
        self.model.add_module("embed_out", nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.data = torch.Generator().manual_seed(100 + rank)

    def train(self) -> None:
        batch = torch.randn(16, 6, generator=self.data)
        self.optimizer.zero_grad()
        (self.model(batch) - batch[:, :3].sin()).square().mean().backward()
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]


def reference() -> list[Tensor]:
    """Classic DiLoCo in one process."""
    workers = [Worker(rank) for rank in range(WORKERS)]
    parent = [p.clone() for p in workers[0].parameters()]
    momentum = [torch.zeros_like(p) for p in parent]
    for _ in range(ROUNDS):
        for worker in workers:
            for local, value in zip(worker.parameters(), parent, strict=True):
                local.copy_(value)
            for _ in range(H):
                worker.train()
        for index, x in enumerate(parent):
            d = torch.zeros_like(x)
            for worker in workers:
                d += (1 / WORKERS) * (x - worker.parameters()[index])
            momentum[index] = 0.9 * momentum[index] + d
            parent[index] = x - 0.7 * (d + 0.9 * momentum[index])
    return parent


def test_classic_diloco_bit_for_bit(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    syncer = subprocess.Popen(
        [
            *(str(Path(sys.executable).parent / "yeto-syncer"), "--port", "0"),
            *("--quorum", str(WORKERS), "--learners", str(WORKERS), "--ready-file", str(ready)),
            *("--total-steps", str(ROUNDS), "--delta-correction", "none"),
            *("--learner-weight", "equal", "--sync-interval-steps", "0"),
            *("--checkpoint-path", str(tmp_path / "state.ckpt")),
        ],
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert syncer.poll() is None
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)
        port = json.loads(ready.read_text())["port"]
        workers = [Worker(rank) for rank in range(WORKERS)]
        steps = [0] * WORKERS
        failures: list[BaseException] = []

        def run(rank: int) -> None:
            config = LearnerConfig(
                connect=f"127.0.0.1:{port}",
                learner_id=rank,
                fragments=1,
                wire_dtype="f32",
                alpha=0.0,
                sync_every=H,
                streams=1,
                final_timeout_s=30,
            )
            try:
                with Learner(workers[rank].model, config) as sync:
                    while True:
                        workers[rank].train()
                        steps[rank] += 1
                        if sync.step(tokens=16).stop:
                            break
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert steps == [H * ROUNDS] * WORKERS
        assert syncer.wait(30) == 0
    finally:
        syncer.kill()
        syncer.wait()
    expected = reference()
    for worker in workers:
        for ours, theirs in zip(worker.parameters(), expected, strict=True):
            assert torch.equal(ours, theirs)


def blocking(port: int, **options: object) -> tuple[nn.Module, Learner]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    settings = {"wire_dtype": "f32", "streams": 1, "alpha": 0.0, "sync_every": 2, **options}
    return model, Learner(model, LearnerConfig(connect=f"127.0.0.1:{port}", **settings))


def test_the_loop_waits_only_at_the_boundary() -> None:
    """The first broadcast before step 1; no answer and no blend between the boundaries."""
    with scripted_syncer() as syncer:
        model, learner = blocking(syncer.port)
        first, merged = values(9, 1), values(9, 2)

        def script() -> None:
            syncer.accepted()
            syncer.expect(InitParams)
            syncer.broadcast(0, 0, first)
            syncer.pull(0, 1)
            syncer.pushes = [syncer.expect(PushFragment)]
            syncer.broadcast(0, 1, merged)

        thread = syncer.play(script)
        with learner as sync:
            assert torch.equal(model.weight.detach().view(-1), first)
            for step in (1, 2):
                with torch.no_grad():
                    model.weight.add_(0.25)
                local = model.weight.detach().clone().view(-1)
                info = sync.step(tokens=8)
                assert info.pushed == info.applied == ((0,) if step == 2 else ())
        thread.join(PATIENCE_S)
        (push,) = syncer.pushes
        assert (push.c_steps, push.c_tokens, push.base_version) == (2, 16, 0)
        assert bytes(push.tensor) == bytes(encode(local - first, DType.F32))
        assert torch.equal(model.weight.detach().view(-1), merged)


def test_a_round_that_runs_ahead_waits_for_the_next_boundary() -> None:
    """A PULL may overtake the broadcast before it; the same progress is never pushed twice."""
    with scripted_syncer() as syncer:
        _, learner = blocking(syncer.port, sync_every=1, final_timeout_s=PATIENCE_S)
        steps: list[int] = []

        def script() -> None:
            syncer.accepted()
            syncer.expect(InitParams)
            syncer.broadcast(0, 0, values(9, 1))
            syncer.pull(0, 1, 1)
            for step in (1, 2):
                for attempt in (1, 2):
                    if attempt > 1:
                        syncer.pull(0, step, attempt)
                    push = syncer.expect(PushFragment)
                    assert (push.step, push.attempt, push.base_version) == (step, attempt, step - 1)
                    steps.append(push.local_step)
                syncer.pull(0, step + 1)
                syncer.broadcast(0, step, values(9, step + 1))

        thread = syncer.play(script)
        with learner as sync:
            sync.step(tokens=1)
            sync.step(tokens=1)
        thread.join(PATIENCE_S)
        assert steps == [1, 1, 2, 2]


def test_a_merge_that_does_not_come_is_an_error() -> None:
    with scripted_syncer() as syncer:
        _, learner = blocking(syncer.port, sync_every=1, final_timeout_s=0.3)
        script = threading.Thread(
            target=lambda: (syncer.accepted(), syncer.broadcast(0, 0, values(9, 1)))
        )
        script.start()
        learner.start()
        script.join(PATIENCE_S)
        with pytest.raises(SyncTimeout, match="the merge of fragment 0"):
            learner.step(tokens=1)
        learner.close()


def test_blocking_and_budget_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="sync_every"):
        LearnerConfig(connect="h:1", sync_every=3, learner_budget_steps=3)
    assert issubclass(SyncTimeout, LearnerError)
