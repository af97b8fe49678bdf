"""A new user's first errors, with the real commands: each ends with one line that says what to do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.demo.programs import Programs
from tests.system.training import Training, free_port


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with Programs(tmp_path) as programs:
        yield Training(tmp_path, programs)


def last_words(training: Training, name: str) -> str:
    training.wait_for_exit(name, code=1)
    return training.said(name)[-1]


def test_what_each_says(training: Training) -> None:
    """Wrong port, NaN loss, wrong run, wrong model, wrong key; the syncer stays."""
    nowhere = training.start_learner(
        0, f"--connect=127.0.0.1:{free_port()}", "--connect-timeout-s=0.2", name="nowhere"
    )
    training.start_syncer("--quorum=1")
    training.wait_for_line("syncer", "listening")
    said = last_words(training, nowhere)
    assert "no syncer at 127.0.0.1:" in said
    assert "is the address right, and does yeto-syncer run there?" in said

    diverged = training.start_learner(0, "--lr=1e30")
    said = last_words(training, diverged)
    assert "is nan; nothing of it was sent; a lower --lr than 1e+30 may help" in said
    assert training.commits() == []

    stranger = training.start_learner(1, "--run-id=other")
    said = last_words(training, stranger)
    assert "session-mismatch: contract" in said
    assert said.endswith("the other learners have another run id (--run-id)")

    wider = training.start_learner(1, "--width=16", name="wider")
    said = last_words(training, wider)
    assert "session-mismatch: fingerprint" in said
    assert "layout.json files show where two models differ" in said

    key = training.folder / "key"
    key.write_text("7" * 64)
    key.chmod(0o600)
    sealed = training.start_learner(1, f"--auth-key-file={key}", name="sealed")
    said = last_words(training, sealed)
    assert said.endswith("give the syncer the key too, or start this learner without one")
    training.signal("syncer", signal.SIGKILL)


def test_a_syncer_that_is_gone_is_said_once(training: Training) -> None:
    """L12: training goes on; what the user sees says so."""
    training.start_syncer("--quorum=1")
    training.start_learner(0)
    training.wait_for_commits(1)
    training.signal("syncer", signal.SIGKILL)
    training.wait_for_line("learner-0", "training goes on, redialling")
    training.wait_for_line("learner-0", "no syncer; ")
    training.signal("learner-0", signal.SIGINT)
    said = last_words(training, "learner-0")
    assert "stopped on request; the run continues without this learner" in said
    assert sum("redialling" in message for message in training.said("learner-0")) == 1
