"""The examples, run as a reader would run them: real processes, a real syncer, a final cut."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.demo.programs import Programs
from tests.system.training import Training

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 150


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with Programs(tmp_path) as programs:
        yield Training(tmp_path, programs)


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; pip install -e '.[dev]'")


def run(training: Training, script: str, *options: str, learners: int = 1) -> list[dict]:
    """Learners of one script to the end of a run; returns their saved models."""
    training.start_syncer(f"--quorum={learners}", "--total-steps=8")
    folders = [training.folder / f"out-{number}" for number in range(learners)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(EXAMPLES / script)),
                *("--connect", f"127.0.0.1:{training.port}", "--learner-id", str(number)),
                *("--output-dir", str(folder), *options),
            ],
            cwd=training.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    training.wait_for_exit("syncer")
    for number, folder in enumerate(folders):
        result = json.loads((folder / "result.json").read_text())
        assert (result["step"], result["learner_id"]) == (8, number)
        assert result["acknowledged"]
        assert result["local_step"] > 0
    assert all(commit.responders[0].c_tokens > 0 for commit in training.commits())
    return [load_file(folder / "model.safetensors") for folder in folders]


def test_plain_loop(training: Training) -> None:
    """Gradient accumulation, autocast, a scheduler; tied weights are saved once (L2)."""
    ours, theirs = run(training, "plain_loop.py", learners=2)
    assert ours.keys() == theirs.keys()
    assert "embed.weight" in ours
    assert "lm_head.weight" not in ours
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_transformers_trainer(training: Training, lora: bool) -> None:
    """Units are the tokens that the Trainer counts; with LoRA only adapters travel."""
    need("transformers", "accelerate", "peft")
    (model,) = run(training, "transformers_trainer.py", *(["--lora"] if lora else []))
    assert all("lora_" in name for name in model) == lora
    assert len(model) == (4 if lora else 28)
    for commit in training.commits():
        responder = commit.responders[0]
        assert responder.c_tokens == responder.c_steps * 2 * 4 * 32


def test_lightning_trainer(training: Training) -> None:
    """One boundary per optimizer step, whose units are those of both its batches."""
    need("lightning")
    (model,) = run(training, "lightning_trainer.py")
    assert "embed.weight" in model
    for commit in training.commits():
        responder = commit.responders[0]
        assert responder.c_tokens == responder.c_steps * 2 * 4 * 32
