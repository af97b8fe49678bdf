"""One rank of a real trainer with two, started by torchrun in test_ranks.py.

Arguments: port, `transformers` or `lightning`, a directory for what each rank ends with.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner import LearnerConfig
from learner.errors import LearnerError

ROWS = 64


def config(port: str) -> LearnerConfig:
    return LearnerConfig(
        connect=f"127.0.0.1:{port}", fragments=1, wire_dtype="f32", streams=1, alpha=0.0
    )


def with_transformers(port: str, out: Path, on_event: Any) -> tuple[Any, nn.Module]:
    from transformers import Trainer, TrainingArguments

    from learner.integrations.transformers import YetoCallback

    class Model(nn.Module):
        main_input_name = "x"

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.inner(x) - labels).square().mean()}

    torch.manual_seed(1)
    model = Model()
    rows = [{"x": torch.randn(4), "labels": torch.randn(2)} for _ in range(ROWS)]
    callback = YetoCallback(config(port), on_event=on_event)
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=1_000_000,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        logging_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    try:
        trainer.train()
    except LearnerError as error:
        return error, model
    return callback, model


def with_lightning(port: str, out: Path, on_event: Any) -> tuple[Any, nn.Module]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from learner.integrations.lightning import YetoCallback

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.inner(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(1)
    model = Model()
    callback = YetoCallback(config(port), on_event=on_event)
    trainer = pl.Trainer(
        max_epochs=-1,
        callbacks=[callback],
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(ROWS, 4)), batch_size=2)
    try:
        trainer.fit(model, loader)
    except LearnerError as error:
        return error, model
    return callback, model


def main() -> None:
    port, kind, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    warnings.simplefilter("ignore")
    events: list[str] = []
    run = with_transformers if kind == "transformers" else with_lightning
    end, model = run(port, out, lambda event: events.append(type(event).__name__))
    rank = dist.get_rank()
    report: dict[str, Any] = {
        "events": events,
        "values": [number for value in model.parameters() for number in value.flatten().tolist()],
    }
    if isinstance(end, LearnerError):
        report["error"] = f"{type(end).__name__}: {end}"
    else:
        report["result"] = list(end.learner.result.versions)
        report["units"] = end.learner.units
        report["steps"] = end.learner.local_step
    (out / f"rank-{rank}.json").write_text(json.dumps(report))
    dist.barrier()  # gloo aborts a rank whose peer leaves in the middle of its own end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
