"""A Lightning `Trainer` as a learner, with gradient accumulation and a scheduler."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from command_line import config_of, own_text, parser
from learner.integrations.lightning import YetoCallback

LENGTH, WIDTH = 32, 32


class TinyLM(pl.LightningModule):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.lm_head = nn.Linear(WIDTH, 256)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (windows,) = batch
        logits = self.lm_head(self.gru(self.embed(windows[:, :-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    """Train until the syncer ends the run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    options = parser(__doc__ or "").parse_args()
    pl.seed_everything(0, verbose=False)  # every learner starts from the same parameters
    model = TinyLM()
    windows = torch.tensor(list(own_text(__file__))).unfold(0, LENGTH + 1, 1)
    order = torch.Generator().manual_seed(options.learner_id)  # the data in an order of its own
    loader = DataLoader(TensorDataset(windows), batch_size=4, shuffle=True, generator=order)
    callback = YetoCallback(config_of(options), tokens=lambda batch: batch[0][:, 1:].numel())
    trainer = pl.Trainer(
        max_epochs=-1,  # the syncer says when it is over
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    print(f"done after {callback.learner.local_step} steps: {callback.learner.result}")


if __name__ == "__main__":
    main()
