"""The built-in task: a small byte-level GPT (about 0.9 million parameters) on plain text.

Pre-norm transformer blocks after Radford et al. 2019 (GPT-2), the output layer tied to the byte
embedding, AdamW after Loshchilov & Hutter 2019 with the constants usual for language models.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import TaskError, TaskSettings, TrainStep
from .text import Corpus, read_text

VOCABULARY = 256
EVALUATION_WINDOWS = 64
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        grown: Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return grown


class ByteGPT(nn.Module):
    """Bytes in, logits over the next byte out.

    Raises TaskError when the width is not a multiple of the number of heads.
    """

    def __init__(self, *, layers: int, width: int, heads: int, seq_len: int) -> None:
        super().__init__()
        if width % heads:
            raise TaskError(f"--width {width} must be a multiple of --heads {heads}")
        self.seq_len = seq_len
        self.embed = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # GPT-2: what adds into the residual stream shrinks with the depth.
                into_residual = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * layers) if into_residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 -> (batch, time, 256) logits; time <= seq_len."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean next-byte cross entropy in nats; windows are (batch, time + 1) int64."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class BytesLM:
    """`--task bytes-lm`."""

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self._corpus = Corpus(
            read_text(settings.data),
            seq_len=settings.seq_len,
            seed=settings.seed,
            learner_id=settings.learner_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = ByteGPT(
                layers=settings.layers,
                width=settings.width,
                heads=settings.heads,
                seq_len=settings.seq_len,
            )
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": WEIGHT_DECAY},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=BETAS,
        )
        self._held_out = torch.from_numpy(self._corpus.held_out(EVALUATION_WINDOWS))
        self._position = 0

    def train_step(self) -> TrainStep:
        batch = self._corpus.batch(self._position, self._settings.batch_size)
        self._position += 1
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model, torch.from_numpy(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return TrainStep(loss.item(), self._settings.batch_size * self._settings.seq_len)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        batches = torch.split(self._held_out, self._settings.batch_size)
        total = sum(loss_of(self.model, part).item() * len(part) for part in batches)
        return total / len(self._held_out)

    def state_dict(self) -> dict[str, int]:
        return {"batches": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["batches"]


@torch.no_grad()
def sample(model: ByteGPT, prompt: bytes, count: int, *, seed: int, temperature: float) -> bytes:
    """`count` bytes that the model writes after a non-empty prompt; a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    model.eval()
    for _ in range(count):
        logits = model(tokens[:, -model.seq_len :])[0, -1] / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn[None]], 1)
    return bytes(tokens[0].tolist()[len(prompt) :])
