"""Real processes from start to final cut, with real signals in the middle."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from benchmarks.demo.programs import Programs
from benchmarks.demo.record import ids
from syncer.tape import EventRecord, read_tape

from .training import Training


@pytest.fixture
def training(tmp_path: Path):
    with Programs(tmp_path) as programs:
        yield Training(tmp_path, programs)


def assert_contiguous(training: Training) -> None:
    """Every step once and in order; a kill between a checkpoint and its record may lose just that
    record, and the `resume` record says so (C43)."""
    steps = [commit.step for commit in training.commits()]
    lost: set[int] = set()
    for record in read_tape(training.tape):
        if isinstance(record, EventRecord) and record.event == "resume":
            kept = record.fields["tape_step"] or 0
            lost |= set(range(kept + 1, record.fields["checkpoint_step"] + 1))
    assert len(lost) <= 1
    assert steps == [step for step in range(1, steps[-1] + 1) if step not in lost]


def exported(training: Training, learner: str) -> dict[str, torch.Tensor]:
    out = training.folder / "exported.safetensors"
    subprocess.run(
        [
            str(Path(sys.executable).with_name("yeto-checkpoint")),
            "export",
            str(training.checkpoint),
            str(out),
            f"--layout={training.folder / learner / 'layout.json'}",
        ],
        check=True,
        timeout=60,
    )
    return load(out.read_bytes())


def test_a_killed_learner_does_not_stop_the_run(training: Training) -> None:
    """C16-C21: three learners, kill -9 of one in the middle; the tape shows who answered."""
    training.start_syncer(
        "--quorum=3", "--total-steps=100", "--min-round-interval-ms=60",
        "--mark-final-checkpoint",
    )  # fmt: skip
    for number in range(3):
        training.start_learner(number)
    training.wait_for_commits(3)
    training.signal("learner-2", signal.SIGKILL)

    training.wait_for_exit("syncer", "learner-0", "learner-1")
    training.wait_for_exit("learner-2", code=-signal.SIGKILL)
    commits = training.commits()
    assert_contiguous(training)
    assert len(commits) == 100
    assert ids(commits[0].responded) == {0, 1, 2}
    assert ids(commits[-1].responded) == {0, 1}
    assert all(len(commit.responded) >= commit.quorum >= 2 for commit in commits)
    assert training.model("learner-0") == training.model("learner-1")
    assert Path(f"{training.checkpoint}.final").exists()


def test_a_learner_waits_for_the_syncer_with_one_line(training: Training) -> None:
    name = training.start_learner(0)
    training.wait_for_line(name, f"waiting for the syncer at 127.0.0.1:{training.port}")
    training.start_syncer("--total-steps=3")
    training.wait_for_exit("syncer", name)
    assert sum("waiting for the syncer" in message for message in training.said(name)) == 1
    assert training.result(name)["step"] == 3


def test_learners_carry_on_while_the_syncer_is_killed_and_resumed(training: Training) -> None:
    """L12: training goes on, redials with back-off, and nothing local is lost."""
    training.start_syncer("--quorum=2")
    names = [training.start_learner(number) for number in range(2)]
    training.wait_for_commits(4)
    training.signal("syncer", signal.SIGKILL)
    training.wait_for_exit("syncer", code=-signal.SIGKILL)
    for name in names:
        training.wait_for_line(name, "syncer lost")
    done = len(training.commits())

    training.start_syncer("--quorum=2", "--resume", name="syncer-2")
    training.wait_for_commits(done + 4)
    training.signal("syncer-2", signal.SIGTERM)
    training.wait_for_exit("syncer-2", *names)
    assert_contiguous(training)
    for name in names:
        assert sum("syncer lost" in message for message in training.said(name)) == 1
    steps = [commit for commit in training.commits() if commit.step > done]
    assert all(responder.c_steps >= 1 for commit in steps for responder in commit.responders)


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_ctrl_c_on_the_syncer_gives_every_learner_the_same_bits(
    training: Training, dtype: str
) -> None:
    """L31, L36, C61: the final cut is f32 whatever the session's dtype."""
    training.start_syncer("--quorum=3")
    names = [training.start_learner(number, f"--wire-dtype={dtype}") for number in range(3)]
    training.wait_for_commits(6)
    training.signal("syncer", signal.SIGINT)
    training.wait_for_exit("syncer", *names)

    assert len({training.model(name) for name in names}) == 1
    merged = exported(training, names[0])
    own = load(training.model(names[0]))
    assert own.keys() == merged.keys()
    assert all(torch.equal(own[key], merged[key]) for key in own)
    results = [training.result(name) for name in names]
    assert {result["step"] for result in results} == {training.commits()[-1].step}
    assert [result["learner_id"] for result in results] == [0, 1, 2]
    assert all(result["acknowledged"] for result in results)


def test_a_learner_with_another_model_is_refused_and_the_run_goes_on(training: Training) -> None:
    """W12 step 13, L13: ERROR names the mismatch, exit 1, no redial."""
    training.start_syncer("--quorum=1")
    training.start_learner(0)
    training.wait_for_commits(1)
    stranger = training.start_learner(1, "--width=16")
    training.wait_for_exit(stranger, code=1)
    assert re.search("session-mismatch", "\n".join(training.said(stranger)))
    assert not (training.folder / stranger / "model.safetensors").exists()
    training.wait_for_commits(len(training.commits()) + 3)
    training.signal("syncer", signal.SIGINT)
    training.wait_for_exit("syncer", "learner-0")


def test_a_stopped_learner_saves_its_state_and_continues_from_it(training: Training) -> None:
    """L50-L54: SIGTERM ends it with 1, the run goes on, a restart continues its counters."""
    state = f"--state-dir={training.folder / 'state'}"
    training.start_syncer("--quorum=1")
    training.start_learner(0)
    training.start_learner(1, state)
    training.wait_for_commits(3, lambda commit: 1 in ids(commit.responded))
    training.signal("learner-1", signal.SIGTERM)
    training.wait_for_exit("learner-1", code=1)
    saved = max(int(path.name[5:]) for path in (training.folder / "state").glob("step-*"))
    assert saved > 0

    again = training.start_learner(1, state, name="learner-1-again")
    seen = len(training.commits())
    training.wait(
        "an answer of the restarted learner",
        lambda: any(1 in ids(commit.responded) for commit in training.commits()[seen:]),
    )
    training.signal("syncer", signal.SIGINT)
    training.wait_for_exit("syncer", "learner-0", again)
    assert int(str(training.result(again)["local_step"])) > saved


def test_the_safety_stop_is_a_failure_and_the_baseline_is_not(training: Training) -> None:
    """cli.md: --max-local-steps exits 1 before finalization, 0 with --connect none."""
    training.start_syncer("--quorum=1")
    training.start_learner(0, "--max-local-steps=5")
    training.wait_for_exit("learner-0", code=1)
    assert any("max_local_steps" in message for message in training.said("learner-0"))
    alone = training.start_learner(1, "--connect=none", "--max-local-steps=5", name="alone")
    training.wait_for_exit(alone)
    finals = [line for line in training.lines if line.event == "final"]
    assert [line.fields["local_step"] for line in finals] == [5]


def test_nobody_listens(training: Training) -> None:
    name = training.start_learner(0, "--connect-timeout-s=0.2")
    training.wait_for_exit(name, code=1)
    assert any(f"127.0.0.1:{training.port}" in message for message in training.said(name))


def test_a_signal_ends_the_wait_for_the_syncer(training: Training) -> None:
    """L54: also out of the first connection's wait."""
    name = training.start_learner(0)
    training.wait_for_line(name, "waiting for the syncer")
    training.signal(name, signal.SIGINT)
    training.wait_for_exit(name, code=1)
