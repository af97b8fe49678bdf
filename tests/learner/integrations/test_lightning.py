"""`YetoCallback` in a real Lightning `Trainer`."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="pip install -e '.[lightning]'")

import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

from learner import LearnerConfig
from learner.config import ConfigError
from learner.errors import NonFiniteParameters, SyncerRefused
from learner.integrations.lightning import YetoCallback, samples_of
from tests.learner.scripted import PATIENCE_S, scripted_syncer, values
from wire.messages import FinalAck, InitParams


class Model(pl.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(4, 2)
        self.count = optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = self.inner(batch[0]).square().mean()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        if self.count == 1:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        return [torch.optim.SGD([p], lr=0.05) for p in self.parameters()]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loader() -> DataLoader:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=2)


def fit(
    callback: YetoCallback, model: Model | None = None, more: Any = (), **settings: Any
) -> pl.Trainer:
    trainer = pl.Trainer(
        **{"max_epochs": -1, **settings},
        callbacks=[callback, *more],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model or Model(), loader())
    return trainer


def alone(**settings: Any) -> YetoCallback:
    return YetoCallback(LearnerConfig(connect="none", **settings))


def test_one_boundary_per_optimizer_step(tmp_path: Path) -> None:
    """10 batches per epoch and 4 to a step: the third step of an epoch has 2 batches."""
    callback = alone(max_local_steps=5)
    trainer = fit(callback, accumulate_grad_batches=4)
    assert trainer.global_step == callback.learner.local_step == 5
    assert callback.learner.units == (4 + 4 + 2 + 4 + 4) * 2


def test_several_optimizers_are_one_step() -> None:
    callback = alone(max_local_steps=3)
    fit(callback, Model(optimizers=2))
    assert callback.learner.local_step == 3
    assert callback.learner.units == 3 * 2


def test_several_optimizers_have_no_durable_state(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one optimizer"):
        fit(alone(state_dir=tmp_path), Model(optimizers=2))


class Look(pl.Callback):
    """What the training starts with, after the callbacks before this one."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.parts = parts(trainer)


def parts(trainer: pl.Trainer) -> list[Tensor]:
    (optimizer,) = trainer.optimizers
    (schedule,) = trainer.lr_scheduler_configs
    states = [state[key] for state in optimizer.state.values() for key in ("step", "exp_avg")]
    found = [*trainer.model.parameters(), *states, torch.tensor(schedule.scheduler.last_epoch)]
    return [value.detach().clone() for value in found]


def test_a_restart_continues(tmp_path: Path) -> None:
    """L51: parameters, moments, schedule."""
    settings = {"state_dir": tmp_path, "state_every_steps": 3}
    first = fit(alone(max_local_steps=3, **settings))
    look, callback = Look(), alone(max_local_steps=4, **settings)
    again = fit(callback, more=[look])
    assert callback.learner.local_step == 4
    assert len(look.parts) == 2 + 4 + 1
    assert all(torch.equal(a, b) for a, b in zip(look.parts, parts(first), strict=True))
    assert [int(value) for value in parts(again)[2::2]] == [4, 4, 4]


@pytest.mark.parametrize("settings", [{"min_epochs": 2}, {"min_steps": 5, "max_steps": 9}])
def test_settings_that_would_lose_the_cut(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="min_epochs and min_steps"):
        fit(alone(), **settings)


def test_the_final_cut_is_in_the_model(tmp_path: Path) -> None:
    """L31, L36: training stops, the cut stays."""
    final = values(10, 5)
    with scripted_syncer() as syncer:
        config = LearnerConfig(
            connect=f"127.0.0.1:{syncer.port}", fragments=1, streams=1, output_dir=tmp_path
        )

        def script() -> None:
            syncer.accepted()
            syncer.expect(InitParams)
            syncer.cut(5, [5], [final])
            syncer.expect(FinalAck)
            syncer.shutdown()

        thread = syncer.play(script)
        callback, model = YetoCallback(config), Model()
        fit(callback, model)
        thread.join(PATIENCE_S)
    assert callback.learner.result.step == 5
    held = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert sorted(held.tolist()) == sorted(final.tolist())
    assert (tmp_path / "model.safetensors").exists()


def test_training_that_ends_first_leaves_the_run(caplog) -> None:
    """L70."""
    with scripted_syncer() as syncer:
        callback = YetoCallback(LearnerConfig(connect=f"127.0.0.1:{syncer.port}", streams=1))
        with caplog.at_level(logging.WARNING, "learner"):
            fit(callback, max_steps=2)
        syncer.closed.get(timeout=PATIENCE_S)
    assert "ended after 2 steps, before the syncer ended the run" in caplog.text


def test_an_error_of_the_run_ends_the_training() -> None:
    """L13."""
    with scripted_syncer() as syncer:
        callback = YetoCallback(LearnerConfig(connect=f"127.0.0.1:{syncer.port}", streams=1))
        script = threading.Thread(target=lambda: (syncer.accepted(), syncer.error("enough")))
        script.start()
        with pytest.raises(SyncerRefused, match="enough"):
            fit(callback)
        script.join(PATIENCE_S)


def test_an_error_of_the_training_leaves_the_run() -> None:
    class Broken(Model):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            raise ZeroDivisionError

    with scripted_syncer() as syncer:
        callback = YetoCallback(LearnerConfig(connect=f"127.0.0.1:{syncer.port}", streams=1))
        with pytest.raises(ZeroDivisionError):
            fit(callback, Broken())
        syncer.closed.get(timeout=PATIENCE_S)


def test_samples_of_batches() -> None:
    assert samples_of(torch.zeros(3, 9)) == 3
    assert samples_of([torch.zeros(()), {"x": (torch.zeros(4),)}]) == 4
    with pytest.raises(ConfigError, match="tokens"):
        samples_of({"text": ["a", "b"]})


def test_a_nan_names_the_tensor() -> None:
    """L27: nothing of it is sent."""

    class Nan(Model):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 1:
                with torch.no_grad():
                    self.inner.bias[1] = float("nan")

    with scripted_syncer() as syncer:
        config = LearnerConfig(connect=f"127.0.0.1:{syncer.port}", fragments=1, streams=1)

        def script() -> None:
            syncer.accepted()
            syncer.expect(InitParams)
            syncer.broadcast(0, 0, values(10, 2))

        thread = syncer.play(script)

        class Pull(pl.Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                if callback.learner.versions == (0,) and not pulled:
                    pulled.append(True)
                    syncer.pull(0, 1)

        pulled: list[bool] = []
        callback = YetoCallback(config)
        with pytest.raises(NonFiniteParameters, match=r"inner\.(bias|weight)"):
            fit(callback, Nan(), more=[Pull()])
        thread.join(PATIENCE_S)
        assert syncer.quiet()
