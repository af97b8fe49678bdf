"""A Hugging Face `Trainer` as a learner; with `--lora` the adapters are all that is trained."""

from __future__ import annotations

import logging
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from command_line import config_of, own_text, parser
from learner.integrations.transformers import YetoCallback

LENGTH = 32


class Windows(Dataset[dict[str, Tensor]]):
    """All windows of a text."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.tensor(list(text))

    def __len__(self) -> int:
        return len(self.text) - LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index : index + LENGTH]
        return {"input_ids": window, "labels": window}


def build_model(lora: bool) -> torch.nn.Module:
    """A tiny GPT-2 from its configuration; with `lora`, frozen but for its adapters."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def main() -> None:
    """Train until the syncer ends the run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parser(__doc__ or "")
    arguments.add_argument("--lora", action="store_true", help="train adapters only (needs peft)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    set_seed(0)  # every learner starts from the same parameters
    model = build_model(options.lora)
    callback = YetoCallback(config_of(options))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=3e-3,
                max_steps=1_000_000,  # the syncer says when it is over
                data_seed=options.learner_id,  # every learner sees the data in its own order
                include_num_input_tokens_seen="all",
                save_strategy="no",
                report_to="none",
                logging_steps=50,
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=Windows(own_text(__file__)),
            callbacks=[callback],
        )
        trainer.train()
    print(f"done after {callback.learner.local_step} steps: {callback.learner.result}")


if __name__ == "__main__":
    main()
