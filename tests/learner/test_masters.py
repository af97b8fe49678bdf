"""bf16 parameters whose optimizer keeps f32 masters (issue 6, point 2; L4, L22, L26)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner import Learner, LearnerConfig
from learner.errors import LayoutError
from learner.masters import NAMES, masters_in
from learner.parameters import Parameters, find_trainables, specs_of
from learner.partition import partition
from tests.learner.scripted import PATIENCE_S, scripted_syncer, values
from wire.dtypes import DType
from wire.messages import FinalAck, InitParams, PushFragment
from wire.tensors import encode


class MasterSGD(torch.optim.Optimizer):
    """SGD with momentum in f32, the parameter is the master's rounding."""

    def __init__(self, parameters: Any, lr: float, name: str = "master_param") -> None:
        super().__init__(parameters, {"lr": lr})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state[self.name] = p.detach().float().clone()
                    state["momentum"] = torch.zeros_like(state[self.name])
                state["momentum"].mul_(0.9).add_(p.grad.float())
                state[self.name].sub_(state["momentum"] * group["lr"])
                p.copy_(state[self.name])


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(8, 6).to(torch.bfloat16)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()


def mapped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Parameters:
    trainables = find_trainables(net)
    return Parameters(trainables, partition(specs_of(trainables), 1), masters=masters_in(optimizer))


def flat(parameters: Parameters, optimizer: torch.optim.Optimizer, name: str) -> Tensor:
    return torch.cat(
        [optimizer.state[slot.parameter][name].flatten() for slot in parameters.slots(0)]
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_is_read_from_the_master(name: str) -> None:
    """A step too small for bf16 shows in the delta."""
    net = model()
    optimizer = MasterSGD(net.parameters(), 1e-7, name)
    parameters = mapped(net, optimizer)
    before = parameters.snapshot(0)  # there is no master before the first step
    train(net, optimizer)
    held = flat(parameters, optimizer, name)
    assert torch.equal(parameters.snapshot(0), held)
    assert torch.equal(parameters.delta(0, before), held - before)
    assert held.bfloat16().float().equal(before)
    assert not held.equal(before)


def test_a_broadcast_goes_into_both() -> None:
    net = model()
    optimizer = MasterSGD(net.parameters(), 0.01)
    parameters = mapped(net, optimizer)
    train(net, optimizer)
    held = flat(parameters, optimizer, "master_param").clone()
    incoming = torch.randn(len(held))
    parameters.blend(0, incoming, 0.25)
    blended = torch.tensor(0.25) * held + torch.tensor(0.75) * incoming
    assert torch.equal(flat(parameters, optimizer, "master_param"), blended)
    for slot in parameters.slots(0):
        assert torch.equal(slot.parameter, slot.of(blended).bfloat16())
    parameters.overwrite(0, incoming)
    assert torch.equal(flat(parameters, optimizer, "master_param"), incoming)
    for slot in parameters.slots(0):
        assert torch.equal(slot.parameter, slot.of(incoming).bfloat16())


def test_momentum_is_no_master() -> None:
    """Only the documented names count, and f32 parameters have none."""
    net = model()
    optimizer = MasterSGD(net.parameters(), 0.01, "something_else")
    train(net, optimizer)
    assert all(masters_in(optimizer)(p) is None for p in net.parameters())
    whole = nn.Linear(2, 2)
    adam = torch.optim.AdamW(whole.parameters())
    adam.state[whole.weight]["master_param"] = torch.zeros(2, 2)
    parameters = mapped(whole, adam)
    assert torch.equal(parameters.snapshot(0)[:4].view(2, 2), whole.weight)


def test_a_master_of_another_shape_is_refused_by_name() -> None:
    net = model()
    learner = Learner(net, LearnerConfig(connect="none"), masters=lambda parameter: torch.zeros(3))
    with pytest.raises(LayoutError, match=r"'weight' is torch.float32 of shape \(3,\)"):
        learner._core.parameters.snapshot(0)
    learner.close()


@pytest.mark.parametrize("explicit", [False, True])
def test_a_run_with_masters(explicit: bool, tmp_path: Path) -> None:
    """Pushes are f32(master) - anchor; broadcasts and the cut are in master and parameter."""
    net = model()
    optimizer = MasterSGD(net.parameters(), 0.01, "own" if explicit else "master_param")
    name = optimizer.name
    numel = sum(p.numel() for p in net.parameters())
    anchor, merged, cut = (values(numel, seed) for seed in (7, 8, 9))
    pushed: list[PushFragment] = []
    with scripted_syncer() as syncer:
        config = LearnerConfig(
            connect=f"127.0.0.1:{syncer.port}", fragments=1, wire_dtype="f32", alpha=0.0,
            streams=1, sync_every=1,
        )  # fmt: skip

        def script() -> None:
            syncer.accepted()
            syncer.expect(InitParams)
            syncer.broadcast(0, 0, anchor)
            syncer.pull(0, 1)
            pushed.append(syncer.expect(PushFragment))
            syncer.broadcast(0, 1, merged)
            syncer.cut(1, (1,), [cut])
            syncer.expect(FinalAck)
            syncer.shutdown()

        talk = syncer.play(script)
        masters = (lambda p: optimizer.state[p].get(name)) if explicit else None
        with Learner(net, config, optimizer=optimizer, masters=masters) as sync:
            slots = sync._core.parameters.slots(0)
            train(net, optimizer)
            trained = torch.cat([optimizer.state[s.parameter][name].flatten() for s in slots])
            info = sync.step(tokens=1)
            while not info.stop:
                info = sync.step(tokens=1)
        talk.join(PATIENCE_S)
    assert bytes(pushed[0].tensor) == bytes(encode(trained - anchor, DType.F32))
    for slot in slots:
        assert torch.equal(optimizer.state[slot.parameter][name], slot.of(cut))
        assert torch.equal(slot.parameter, slot.of(cut).bfloat16())


def test_masters_are_part_of_the_durable_state(tmp_path: Path) -> None:
    """L51: they are optimizer state, f32 to the bit."""
    config = LearnerConfig(
        connect="none", state_dir=tmp_path, state_every_steps=2, max_local_steps=100
    )
    net = model()
    optimizer = MasterSGD(net.parameters(), 0.001)
    with Learner(net, config, optimizer=optimizer) as sync:
        for _ in range(2):
            train(net, optimizer)
            sync.step(tokens=1)
    again = model()
    restored = MasterSGD(again.parameters(), 0.001)
    with Learner(again, config, optimizer=restored) as sync:
        assert sync.local_step == 2
        for old, new in zip(net.parameters(), again.parameters(), strict=True):
            assert torch.equal(old, new)
            assert torch.equal(
                optimizer.state[old]["master_param"], restored.state[new]["master_param"]
            )
            assert restored.state[new]["master_param"].dtype is torch.float32
