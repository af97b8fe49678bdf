"""The built-in training task."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from learner.tasks.base import Task, TaskError, TaskSettings, build_task, installed_tasks
from learner.tasks.bytes_lm import ByteGPT, BytesLM, sample


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat sat on the mat, the dog sat on the log. " * 2000)
    return file


def tiny(text: Path, **changes) -> BytesLM:
    settings = {
        "seed": 0,
        "learner_id": 0,
        "seq_len": 32,
        "batch_size": 4,
        "lr": 3e-3,
        "data": text,
        "layers": 1,
        "width": 32,
        "heads": 2,
        **changes,
    }
    return BytesLM(TaskSettings(**settings))


def weights(task: BytesLM) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(task.model.parameters()).detach()


def test_the_default_model_has_between_half_a_million_and_a_million_parameters(text) -> None:
    task = build_task("bytes-lm", TaskSettings(seed=0, learner_id=0, data=text))
    assert isinstance(task, Task)
    assert 500_000 < sum(p.numel() for p in task.model.parameters()) < 1_000_000


def test_initial_parameters_depend_on_the_seed_only(text) -> None:
    """L15: every island starts from equal trainables."""
    one = weights(tiny(text))
    torch.randn(7)
    assert torch.equal(one, weights(tiny(text, learner_id=2**32 - 1, lr=1.0)))
    assert not torch.equal(one, weights(tiny(text, seed=2**63 - 1)))


def test_building_a_task_leaves_the_global_generator_alone(text) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny(text)
    assert torch.equal(torch.rand(1), expected)


def test_training_lowers_the_held_out_loss(text) -> None:
    task = tiny(text)
    before = task.evaluate()
    assert before == pytest.approx(5.545, abs=0.3)  # ln 256: knows nothing yet
    for _ in range(60):
        step = task.train_step()
    assert step.tokens == 4 * 32
    assert task.evaluate() < 0.6 * before


def test_training_is_a_function_of_seed_and_learner(text) -> None:
    def after_two_steps(learner_id: int) -> torch.Tensor:
        task = tiny(text, learner_id=learner_id)
        task.train_step()
        task.train_step()
        return weights(task)

    assert torch.equal(after_two_steps(1), after_two_steps(1))
    assert not torch.equal(after_two_steps(1), after_two_steps(2))


def test_seeking_continues_the_data_order(text) -> None:
    """L50: the data position is part of the durable state."""
    straight, resumed = tiny(text), tiny(text)
    for _ in range(3):
        straight.train_step()
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
    resumed.load_state_dict(straight.state_dict())
    assert straight.train_step() == resumed.train_step()
    assert torch.equal(weights(straight), weights(resumed))


def test_a_byte_sees_only_the_bytes_before_it() -> None:
    model = ByteGPT(layers=2, width=32, heads=4, seq_len=16)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    logits, other = model(tokens), model(changed)
    assert torch.allclose(logits[0, :10], other[0, :10], atol=1e-6)
    assert not torch.allclose(logits[0, 10:], other[0, 10:], atol=1e-6)


def test_samples_are_a_function_of_the_seed(text) -> None:
    model = tiny(text).model
    one = sample(model, b"the ", 40, seed=1, temperature=0.8)
    assert len(one) == 40
    assert one == sample(model, b"the ", 40, seed=1, temperature=0.8)
    assert one != sample(model, b"the ", 40, seed=2, temperature=0.8)


def test_impossible_sizes_and_unknown_tasks_are_refused(text) -> None:
    with pytest.raises(TaskError, match="--width 30 must be a multiple of --heads 4"):
        tiny(text, width=30, heads=4)
    with pytest.raises(TaskError, match=r"installed: .*bytes-lm"):
        build_task("images", TaskSettings(seed=0, learner_id=0))


def test_tasks_of_other_packages_are_found(monkeypatch, text) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("mine", "learner.tasks.bytes_lm:BytesLM", "yeto.tasks")
    monkeypatch.setattr("learner.tasks.base.entry_points", lambda group: [point])
    assert set(installed_tasks()) == {"mine", "bytes-lm"}
    assert isinstance(build_task("mine", TaskSettings(seed=0, learner_id=0, data=text)), Task)
