"""Golden vectors of the weights, merges, correction and outer step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from syncer.merge.plan import NonFiniteMerge
from syncer.merge.weights import learner_weight
from tests.syncer.merge.rounds import floats, make_job, merged, run
from wire.layout import MergeMode

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())["vectors"]


def golden(*kinds: str) -> list:
    return [pytest.param(v, id=v["id"]) for v in GOLDEN if v["kind"] in kinds]


@pytest.mark.parametrize("vector", golden("learner_weight"))
def test_learner_weight(vector: dict) -> None:
    assert learner_weight(**vector["input"]) == vector["expected"]


@pytest.mark.parametrize("vector", golden("avg", "rda", "iso"))
def test_merge(vector: dict) -> None:
    given = vector["input"]
    job = make_job(
        [floats(g) for g in given["grads"]],
        mode=MergeMode[vector["kind"].upper()],
        weights=given["weights"],
        shapes=[tuple(given["shape"])] if "shape" in given else None,
    )
    result = merged(job)
    assert np.abs(result - floats(vector["expected"])).max() <= vector.get("tol", 0)


def corrected(given: dict, momentum: str = "momentum") -> np.ndarray:
    job = make_job([floats(given["grad"])], momentum=floats(given[momentum]), heloco=True)
    return merged(job)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("vector", golden("heloco"))
def test_correction(vector: dict) -> None:
    grad, momentum = floats(vector["input"]["grad"]), floats(vector["input"]["momentum"])
    result = corrected(vector["input"])
    expected = vector["expected"]
    if "unchanged" in expected:
        assert result.tolist() == grad.tolist()
    if "cosine_increases" in expected:
        assert cosine(result, momentum) > cosine(grad, momentum)
    if "first_abs_lt" in expected:
        assert abs(result[0]) < expected["first_abs_lt"]
    if "norm_preserved_abs" in expected:
        change = np.linalg.norm(result) - np.linalg.norm(grad)
        assert abs(change) <= expected["norm_preserved_abs"]


@pytest.mark.parametrize("vector", golden("heloco_rotate"))
def test_rotation(vector: dict) -> None:
    result = corrected(vector["input"])
    assert np.abs(result - floats(vector["expected"])).max() <= vector["tol"]


@pytest.mark.parametrize("vector", golden("heloco_confidence"))
def test_a_larger_momentum_moves_the_gradient_less(vector: dict) -> None:
    grad = floats(vector["input"]["grad"])
    small = np.linalg.norm(corrected(vector["input"], "small_momentum") - grad)
    large = np.linalg.norm(corrected(vector["input"], "large_momentum") - grad)
    assert large < small


@pytest.mark.parametrize("vector", golden("nesterov"))
def test_outer_step(vector: dict) -> None:
    given = vector["input"]
    job = make_job(
        [floats(given["grad"])],
        params=floats(given["p"]),
        momentum=floats(given["buf"]),
        lr=given["lr"],
        mu=given["mu"],
    )
    result = run(job)
    assert result.params.tolist() == vector["expected"]["p"]
    assert result.momentum.tolist() == vector["expected"]["buf"]


@pytest.mark.parametrize("vector", golden("nesterov_overflow"))
def test_outer_step_overflow(vector: dict) -> None:
    given = vector["input"]
    job = make_job(
        [floats(given["grad"])], params=floats(given["p"]), lr=given["lr"], mu=given["mu"]
    )
    with pytest.raises(NonFiniteMerge):
        run(job)
    assert job.params.tolist() == given["p"]
    assert job.momentum.tolist() == [0.0]


@pytest.mark.parametrize("vector", golden("iso_fragment_step"))
def test_iso_fragment_step(vector: dict) -> None:
    given = vector["input"]
    job = make_job(
        [floats(given["grad"])],
        mode=MergeMode.ISO,
        shapes=[tuple(given["shape"])],
        params=floats(given["params"]),
        lr=given["lr"],
        mu=given["mu"],
    )
    result = run(job)
    expected = vector["expected"]
    assert np.abs(result.params.numpy() - floats(expected["params"])).max() <= vector["tol"]
    assert abs(result.gnorm - expected["gnorm"]) <= vector["tol"]
