"""`YetoCallback` in a real `transformers.Trainer`."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
pytest.importorskip("accelerate", reason="pip install -e '.[transformers]'")

from transformers import Trainer, TrainingArguments

from learner import LearnerConfig
from learner.config import ConfigError
from learner.errors import SyncerRefused
from learner.integrations.transformers import YetoCallback
from tests.learner.scripted import PATIENCE_S, scripted_syncer, values
from wire.messages import BudgetDone, FinalAck, InitParams, PushFragment

ROWS = [{"x": torch.randn(4), "labels": torch.randn(2)} for _ in range(64)]


class Model(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (nn.functional.dropout(self.inner(x), 0.1) - labels).square().mean()}


def trainer(folder: Path, callback: YetoCallback, **arguments: object) -> Trainer:
    settings = {
        "max_steps": 1000,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_strategy": "no",
        **arguments,
    }
    return Trainer(
        model=Model(),
        args=TrainingArguments(output_dir=str(folder / "trainer"), **settings),
        train_dataset=ROWS,
        callbacks=[callback],
    )


def alone(**settings: object) -> YetoCallback:
    return YetoCallback(LearnerConfig(connect="none", **settings))


def test_one_boundary_per_optimizer_step_and_its_samples(tmp_path: Path) -> None:
    callback = alone(max_local_steps=3)
    trainer(tmp_path, callback, gradient_accumulation_steps=4).train()
    assert callback.learner.local_step == 3
    assert callback.learner.units == 3 * 4 * 2


def test_units_that_the_trainer_counts(tmp_path: Path) -> None:
    callback = alone(max_local_steps=3)
    counted = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}
    trainer(tmp_path, callback, **counted).train()
    assert callback.learner.units == 3 * 2 * 2 * 4


def test_units_that_the_user_gives(tmp_path: Path) -> None:
    callback = YetoCallback(LearnerConfig(connect="none", max_local_steps=2), tokens=500)
    trainer(tmp_path, callback).train()
    assert callback.learner.units == 1000


def test_a_restart_continues(tmp_path: Path) -> None:
    """L51: parameters, moments, schedule; the Trainer counts on from the saved step."""

    def parts(trained: Trainer) -> list[Tensor]:
        moments = [s["exp_avg"] for s in trained.optimizer.optimizer.state.values()]
        return [*trained.model.parameters(), *moments]

    schedule = {"lr_scheduler_type": "linear", "max_steps": 9}
    settings = {"state_dir": tmp_path / "state", "state_every_steps": 4}
    first = trainer(tmp_path, alone(max_local_steps=4, **settings), **schedule)
    first.train()
    again = trainer(tmp_path, alone(max_local_steps=5, **settings), **schedule)
    seen: list[Tensor] = []
    again.create_optimizer_and_scheduler(9)
    original = again.callback_handler.callbacks[-1].on_train_begin

    def look(*arguments: object, **rest: object) -> None:
        original(*arguments, **rest)
        seen.extend(value.clone() for value in parts(again))

    again.callback_handler.callbacks[-1].on_train_begin = look
    again.train()
    assert again.state.global_step == 5
    assert again.lr_scheduler.last_epoch == 5
    assert len(seen) == 4
    assert all(torch.equal(a, b) for a, b in zip(seen, parts(first), strict=True))


def test_arguments_that_would_lose_the_cut(tmp_path: Path) -> None:
    callback = alone()
    refused = trainer(tmp_path, callback)
    refused.args.load_best_model_at_end = True
    with pytest.raises(ConfigError, match="load_best_model_at_end"):
        refused.train()


def test_training_that_ends_first_leaves_the_run(tmp_path: Path, caplog) -> None:
    """L70: no result, a warning, and the group is closed."""
    with scripted_syncer() as syncer:
        config = LearnerConfig(connect=f"127.0.0.1:{syncer.port}", streams=1)
        callback = YetoCallback(config)
        with caplog.at_level(logging.WARNING, "learner"):
            trainer(tmp_path, callback, max_steps=2).train()
        syncer.closed.get(timeout=PATIENCE_S)
    assert callback.learner.result is None
    assert "ended after 2 steps, before the syncer ended the run" in caplog.text


def test_an_error_of_the_run_ends_the_training(tmp_path: Path) -> None:
    """L13: raised out of `train` at the next boundary."""
    with scripted_syncer() as syncer:
        callback = YetoCallback(LearnerConfig(connect=f"127.0.0.1:{syncer.port}", streams=1))
        script = threading.Thread(target=lambda: (syncer.accepted(), syncer.error("enough")))
        script.start()
        with pytest.raises(SyncerRefused, match="enough"):
            trainer(tmp_path, callback, max_steps=1_000_000).train()
        script.join(PATIENCE_S)


def test_a_budget_run(tmp_path: Path) -> None:
    """L40-L42: the trainer stops after exactly N steps, and the final cut is in the model."""
    config = {"wire_dtype": "f32", "fragments": 1, "streams": 1, "learner_budget_steps": 3}
    final = values(10, 5)
    with scripted_syncer() as syncer:
        callback = YetoCallback(
            LearnerConfig(connect=f"127.0.0.1:{syncer.port}", output_dir=tmp_path / "out", **config)
        )

        def script() -> None:
            syncer.accepted()
            both = [syncer.inbox.get(timeout=PATIENCE_S) for _ in range(2)]  # on two sockets
            assert {type(message) for message in both} == {InitParams, BudgetDone}
            assert BudgetDone(3) in both
            syncer.drop()
            syncer.accepted()
            while not isinstance(message := syncer.inbox.get(timeout=PATIENCE_S), PushFragment):
                if isinstance(message, InitParams):
                    syncer.broadcast(0, 4, values(10, 2))
                    syncer.pull(0, 5)
            assert (message.c_steps, message.c_tokens) == (3, 6)
            syncer.cut(5, [5], [final])
            syncer.expect(FinalAck)
            syncer.shutdown()

        thread = syncer.play(script)
        trained = trainer(tmp_path, callback)
        trained.train()
        thread.join(PATIENCE_S)
    assert trained.state.global_step == 3
    assert callback.learner.result.step == 5
    held = torch.cat([p.detach().flatten() for p in trained.model.parameters()])
    assert sorted(held.tolist()) == sorted(final.tolist())
    assert (tmp_path / "out" / "model.safetensors").exists()
