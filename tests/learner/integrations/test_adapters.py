"""Adapters as the trainable set: the frozen base stays where it is (L1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from learner import Learner, LearnerConfig
from tests.learner.scripted import PATIENCE_S, scripted_syncer, values
from wire.messages import InitParams, PushFragment


class LowRank(nn.Module):
    """A frozen layer with a low-rank addition, by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def by_hand() -> nn.Module:
    return nn.Sequential(LowRank(nn.Linear(6, 5)), nn.Tanh(), LowRank(nn.Linear(5, 3)))


def by_peft() -> nn.Module:
    peft = pytest.importorskip("peft", reason="pip install peft")
    base = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))


def test_of_a_transformer_only_the_adapters_are_in_the_layout() -> None:
    """Real peft on a real GPT-2, built from its config."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    )
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    learner = Learner(adapted, LearnerConfig(connect="none", fragments=2))
    names = [spec.name for fragment in learner.layout.fragments for spec in fragment.tensors]
    assert sorted(names) == [
        f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{part}.default.weight"
        for layer in (0, 1)
        for part in "AB"
    ]
    learner.close()


@pytest.mark.parametrize("build", [by_hand, by_peft])
def test_only_adapters_travel_and_only_they_change(build) -> None:
    torch.manual_seed(0)
    model = build()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if n not in trainable}
    assert len(trainable) == len(frozen) == 4
    total = sum(p.numel() for p in trainable.values())
    optimizer = torch.optim.AdamW(trainable.values(), lr=0.1)
    received = values(total, 3)
    with scripted_syncer() as syncer:
        config = LearnerConfig(
            connect=f"127.0.0.1:{syncer.port}",
            fragments=1,
            wire_dtype="f32",
            alpha=0.0,
            streams=1,
            sync_every=1,
        )
        pushes: list[PushFragment] = []

        def script() -> None:
            syncer.accepted()
            assert len(syncer.expect(InitParams).tensor) == 4 * total
            syncer.broadcast(0, 0, received)
            syncer.pull(0, 1)
            pushes.append(syncer.expect(PushFragment))
            syncer.broadcast(0, 1, received + 1)

        thread = syncer.play(script)
        with Learner(model, config, optimizer=optimizer) as sync:
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            sync.step(tokens=4)
        thread.join(PATIENCE_S)
    assert pushes[0].tensor.nbytes == 4 * total
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    held = torch.cat([p.detach().flatten() for p in trainable.values()])
    assert sorted(held.tolist()) == sorted((received + 1).tolist())
