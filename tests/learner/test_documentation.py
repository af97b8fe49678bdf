"""The loop in docs/learner.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.learner.scripted import PATIENCE_S, scripted_syncer, values
from wire.messages import FinalAck, InitParams

ROOT = Path(__file__).parents[2]


def test_the_first_loop(tmp_path: Path, monkeypatch: Any) -> None:
    """Point 1: three lines around somebody's loop, with two parameter groups."""
    text = (ROOT / "docs" / "learner.md").read_text()
    loop = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert loop.count("\n") < 12
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    )

    def train(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    cut = values(8, 3)
    with scripted_syncer() as syncer:

        def script() -> None:
            assert syncer.accepted().learner_id == 0
            for _ in range(2):
                syncer.expect(InitParams)
            syncer.cut(5, (5, 4), [cut[:6], cut[6:]])
            assert syncer.expect(FinalAck).step == 5
            syncer.shutdown()

        talk = syncer.play(script)
        names = {"model": model, "optimizer": optimizer, "train": train}
        names["data"] = iter(lambda: torch.randn(4, 3), None)
        exec(loop.replace("29400", str(syncer.port)), names)
        talk.join(PATIENCE_S)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["weight"].flatten(), cut[:6])
    assert torch.equal(model.bias.detach(), cut[6:])
