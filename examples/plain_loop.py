"""A plain PyTorch loop as a learner: gradient accumulation, autocast, clipping, a scheduler."""

from __future__ import annotations

import logging
import math
import signal

import torch
from torch import Tensor, nn

from command_line import config_of, own_text, parser
from learner import Learner

ACCUMULATE, BATCH, LENGTH, WIDTH = 2, 4, 32, 32


class TinyLM(nn.Module):
    """Bytes in, logits over the next byte out; the output layer is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.gru(self.embed(tokens))[0])


class Batches:
    """Random windows of a text; knows where it stands, so that a restart can go on there."""

    def __init__(self, text: bytes, learner_id: int) -> None:
        self.text = torch.tensor(list(text))
        self.learner_id = learner_id
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1_000_000 * self.learner_id + self.position)
        starts = torch.randint(len(self.text) - LENGTH, (BATCH, 1), generator=draw)
        windows = self.text[starts + torch.arange(LENGTH + 1)]
        self.position += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    """Train until the syncer ends the run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    options = parser(__doc__ or "").parse_args()
    torch.manual_seed(0)  # every learner starts from the same parameters
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
    data = Batches(own_text(__file__), options.learner_id)

    with Learner(
        model, config_of(options), optimizer=optimizer, scheduler=scheduler, data=data
    ) as sync:
        signal.signal(signal.SIGTERM, lambda *_: sync.request_stop())
        stop = False
        while not stop:
            optimizer.zero_grad()
            tokens, total = 0, 0.0
            for _ in range(ACCUMULATE):
                inputs, targets = data.next()
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(inputs)
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                (loss / ACCUMULATE).backward()
                tokens += targets.numel()
                total += loss.item() / ACCUMULATE
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            stop = sync.step(tokens=tokens).stop
            if math.log2(sync.local_step).is_integer() or stop:
                print(f"step {sync.local_step}: loss {total:.3f}", flush=True)
        if sync.result is not None and options.output_dir is not None:
            sync.save_result()


if __name__ == "__main__":
    main()
