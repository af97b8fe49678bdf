"""Whole runs of a real `yeto-syncer` with scripted clients."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from syncer.tape import EventRecord, read_commits, read_tape
from tests.system.client import Client, Syncer, drive, frame
from wire.dtypes import DType
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec
from wire.messages import Broadcast, BudgetDone, FinalAck, PullRequest

Start = Callable[..., Syncer]
Join = Callable[..., Client]
PLAIN = ("--outer-lr", "1", "--outer-momentum", "0", "--delta-correction", "none")
INIT = [np.arange(6, dtype=np.float32), np.full(4, -1.0, np.float32)]


def final_state(path: Path) -> list[np.ndarray]:
    """The file of K23."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data)
    at, found = 4, []
    for _ in range(count):
        (numel,) = struct.unpack_from("<Q", data, at)
        found.append(np.frombuffer(data, np.float32, numel, at + 8))
        at += 8 + 4 * numel
    assert at == len(data)
    return found


@pytest.mark.parametrize(("dtype", "streams"), [(DType.F32, 0), (DType.F32, 2), (DType.BF16, 1)])
def test_three_learners_six_rounds_and_the_final_cut(
    syncer: Start, join: Join, tmp_path: Path, dtype: DType, streams: int
) -> None:
    """C5 to C37, C60 to C66, K20, K23, C41, exit 0."""
    process = syncer(
        *("--quorum", "3", "--total-steps", "6", "--checkpoint-every", "1"),
        *("--mark-final-checkpoint", "--final-state", str(tmp_path / "final.bin"), *PLAIN),
    )
    clients = [join(process, number, dtype=dtype, streams=streams) for number in range(3)]
    clients[0].init(INIT)
    drive(clients)
    assert [client.ended for client in clients] == ["SHUTDOWN"] * 3
    assert process.wait() == 0
    # Every round adds the mean of 0.25, 0.5 and 0.75 to one fragment (N5, N7, N18).
    expected = [INIT[0] + 1.5, INIT[1] + 1.5]
    for client in clients:
        assert client.manifest is not None
        assert (client.manifest.step, client.manifest.versions) == (6, (5, 6))
        for fragment in range(2):
            np.testing.assert_allclose(client.final[fragment], expected[fragment], rtol=1e-6)
            assert client.final[fragment].tobytes() == clients[0].final[fragment].tobytes()
    state = final_state(tmp_path / "final.bin")
    assert [values.tobytes() for values in state] == [
        clients[0].final[fragment].tobytes() for fragment in range(2)
    ]
    marker = Path(f"{process.checkpoint}.final").read_text()
    assert marker == "YETO_FINAL_V1\nglobal_step=6\n"
    commits = read_commits(process.tape)
    assert [(record.step, record.fragment) for record in commits] == [
        (1, 0), (2, 1), (3, 0), (4, 1), (5, 0), (6, 1),
    ]  # fmt: skip
    assert all([responder.id for responder in r.responders] == [0, 1, 2] for r in commits)
    events = [r.event for r in read_tape(process.tape) if isinstance(r, EventRecord)]
    assert events[0] == "start"
    assert events[-1] == "finalize"
    assert "all learners acknowledged final cut" in process.stderr
    assert "training complete after 6 outer steps" in process.stderr
    assert "semantic_profile_sha256=" in process.stderr
    assert not process.ready_path.exists()


def test_sigterm_finalizes_at_the_last_commit(syncer: Start, join: Join) -> None:
    """C80: a run without --total-steps ends by a signal, every learner with the exact cut."""
    process = syncer("--quorum", "2", "--checkpoint-every", "1")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    drive(clients, until=lambda: all(client.versions.get(0, 0) >= 3 for client in clients))
    process.signal()
    drive(clients)
    assert process.wait() == 0
    last = read_commits(process.tape)[-1].step
    assert [client.manifest.step for client in clients if client.manifest] == [last, last]
    assert not Path(f"{process.checkpoint}.final").exists()
    assert clients[0].final[1].tobytes() == clients[1].final[1].tobytes()


def test_the_second_signal_writes_the_last_commit_and_exits_1(syncer: Start, join: Join) -> None:
    """C81."""
    process = syncer("--quorum", "1", "--checkpoint-every", "0", "--mark-final-checkpoint")
    client = join(process)
    client.init(INIT)
    drive([client], until=lambda: client.versions.get(1, 0) >= 2)
    pull = client.expect(PullRequest)
    assert pull.step >= 1
    process.signal()
    process.signal(signal.SIGINT)
    assert process.wait() == 1
    assert process.checkpoint.exists()
    assert not Path(f"{process.checkpoint}.final").exists()
    assert process.stderr.strip().splitlines()[-1].count("signal") == 1


@pytest.mark.parametrize(("marked", "code"), [(False, 0), (True, 1)])
def test_a_signal_before_the_barrier_has_nothing_to_finalize(
    syncer: Start, join: Join, marked: bool, code: int
) -> None:
    """C82."""
    process = syncer("--quorum", "2", *(["--mark-final-checkpoint"] if marked else []))
    client = join(process)
    client.init(INIT)
    client.expect(Broadcast)
    process.signal()
    assert client.until_end().startswith("stopped: ")
    assert process.wait() == code
    assert not process.checkpoint.exists()
    assert not process.ready_path.exists()


def test_a_storm_of_signals_ends_in_order(syncer: Start) -> None:
    """C82, C86: 0 when the first one was over before the second came, else 1."""
    process = syncer()
    for _ in range(20):
        if process.poll() is None:
            process.signal()
    assert process.wait() in (0, 1)
    assert not process.ready_path.exists()


def test_a_second_signal_before_the_barrier_exits_1(syncer: Start, join: Join) -> None:
    """C86, INIT: it comes while the learner that was told has not left yet."""
    process = syncer("--quorum", "2")
    client = join(process)
    client.init(INIT)
    client.expect(Broadcast)
    process.signal()
    assert client.until_end().startswith("stopped: ")
    process.signal(signal.SIGINT)
    assert process.wait() == 1
    assert process.stderr.strip().splitlines()[-1].count("second signal") == 1


def test_a_second_signal_after_the_last_acknowledgement_exits_1(syncer: Start, join: Join) -> None:
    """C86, DONE: what was promised is written all the same."""
    process = syncer("--quorum", "1", "--total-steps", "2", "--mark-final-checkpoint")
    client = join(process)
    client.init(INIT)
    drive([client], until=lambda: client.ended)
    process.signal()
    process.signal(signal.SIGINT)
    assert process.wait() == 1
    assert Path(f"{process.checkpoint}.final").exists()


def test_an_early_learner_gets_the_model_before_the_barrier(syncer: Start, join: Join) -> None:
    """C9: fragment-major, in version 0, and no PULL before the quorum is there (C8)."""
    process = syncer("--quorum", "2")
    client = join(process, 1)
    first = join(process, 0)
    first.init(INIT)
    broadcasts = [client.expect(Broadcast), client.expect(Broadcast)]
    assert [(b.fragment, b.version) for b in broadcasts] == [(0, 0), (1, 0)]
    assert client.params[0].tolist() == INIT[0].tolist()


def test_a_late_learner_gets_every_fragment_and_takes_part(syncer: Start, join: Join) -> None:
    """C37."""
    process = syncer("--quorum", "1", "--grace-ms", "200", "--pipeline", "1")
    first = join(process, 0)
    first.init(INIT)
    drive([first], until=lambda: first.versions.get(1, 0) >= 2)
    late = join(process, 7)
    drive([first, late], until=lambda: late.versions.get(0, 0) > 2 and late.local_step >= 2)
    process.signal()
    drive([first, late])
    assert process.wait() == 0
    assert {r.id for r in read_commits(process.tape)[-1].responders} == {0, 7}


def test_a_dead_learner_does_not_hold_the_round(syncer: Start, join: Join) -> None:
    """C21b: the attempt that lost its quorum ends at once, the next one needs who is left."""
    process = syncer("--quorum", "3", "--total-steps", "3", "--quorum-timeout-s", "600")
    clients = [join(process, number) for number in range(3)]
    clients[0].init(INIT)
    clients[2].expect(PullRequest)
    clients[2].close()
    clients.pop()
    drive(clients)
    assert process.wait() == 0
    reasons = [
        record.fields["reason"]
        for record in read_tape(process.tape)
        if isinstance(record, EventRecord) and record.event == "attempt_discarded"
    ]
    assert set(reasons) == {"quorum_unreachable"}
    assert [record.quorum for record in read_commits(process.tape)] == [2, 2, 2]


def test_kill_and_resume_gives_the_same_bits(syncer: Start, join: Join, tmp_path: Path) -> None:
    """C7, C43, K10: no broadcast that anyone saw is newer than what resume brings back."""
    options = ("--quorum", "1", "--checkpoint-every", "1", "--total-steps", "8", "--pipeline", "1")
    process = syncer(*options)
    client = join(process)
    client.init(INIT)
    drive([client], until=lambda: client.versions.get(1, 0) >= 4)
    process.kill()
    seen = dict(client.versions)
    again = syncer(*options, "--resume")
    second = join(again)
    second.expect(Broadcast)
    second.expect(Broadcast)
    assert all(second.versions[fragment] >= version for fragment, version in seen.items())
    second.local_step = client.local_step
    drive([second])
    assert again.wait() == 0
    steps = [record.step for record in read_commits(again.tape)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8
    (resume,) = (
        r for r in read_tape(again.tape) if isinstance(r, EventRecord) and r.event == "resume"
    )
    assert resume.fields["checkpoint_step"] >= max(seen.values())
    assert "resuming step" in again.stderr


def test_a_finished_run_resumed_only_delivers(syncer: Start, join: Join) -> None:
    """C9, C60: t = T goes straight to the final cut."""
    options = ("--quorum", "1", "--total-steps", "2", "--mark-final-checkpoint")
    process = syncer(*options, "--final-ack-timeout-s", "1")
    client = join(process)
    client.init(INIT)
    drive([client], acknowledge=False)
    assert client.ended is not None
    assert client.ended.startswith("final-timeout: ")
    assert process.wait() == 1
    again = syncer(*options, "--resume")
    second = join(again)
    drive([second])
    assert again.wait() == 0
    assert second.manifest is not None
    assert second.manifest.versions == (1, 2)
    assert not any(isinstance(message, Broadcast | PullRequest) for message in second.received)
    assert Path(f"{again.checkpoint}.final").exists()


def test_a_learner_that_reconnects_during_delivery_gets_the_cut_again(
    syncer: Start, join: Join
) -> None:
    """C60, C63, C64."""
    process = syncer("--quorum", "2", "--total-steps", "2")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    drive(clients, acknowledge=False, until=lambda: all(client.has_cut for client in clients))
    clients[0].send(FinalAck(2))
    clients[1].close()
    back = join(process, 1)
    drive([clients[0], back])
    assert (clients[0].ended, back.ended) == ("SHUTDOWN", "SHUTDOWN")
    assert process.wait() == 0


def test_budget_cutoff(syncer: Start, join: Join) -> None:
    """C70 to C74: gate, whole rounds discarded, unmarked checkpoint, all sockets closed."""
    options = ("--learners", "2", "--quorum", "1", "--learner-budget-steps", "10")
    process = syncer(*options)
    Path(f"{process.checkpoint}.final").write_text("stale")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    drive(clients, until=lambda: all(client.versions.get(1, 0) >= 2 for client in clients))
    for client in clients:
        client.send(BudgetDone(10))
    assert {client.until_end() for client in clients} == {"eof"}
    assert process.wait() == 0
    assert "learner-budget cutoff checkpoint written" in process.stderr
    assert process.checkpoint.exists()
    records = list(read_tape(process.tape))
    assert isinstance(records[-1], EventRecord)
    assert records[-1].event == "cutoff"


@pytest.mark.parametrize("payload", [struct.pack("<Q", 11), b"123456789"])
def test_a_wrong_budget_report_ends_the_run(syncer: Start, join: Join, payload: bytes) -> None:
    """C75."""
    process = syncer("--learners", "1", "--quorum", "1", "--learner-budget-steps", "10")
    client = join(process)
    client.init(INIT)
    client.expect(PullRequest)
    client.send_raw(frame(14, payload))
    assert process.wait() == 1
    assert not process.checkpoint.exists()


def test_json_logs_are_objects(syncer: Start) -> None:
    process = syncer("--log-format", "json")
    process.signal()
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    listening = next(line for line in lines if line.get("event") == "listening")
    assert listening["port"] == process.port
    assert len(listening["semantic_profile_sha256"]) == 64


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")


def iso_layout() -> NamedLayout:
    return NamedLayout(
        tuple(
            NamedFragment(MergeMode.ISO, (TensorSpec(f"w{index}", shape),))
            for index, shape in enumerate([(2, 3), (2, 2)])
        )
    )


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@needs_proc
def test_a_run_with_svd_workers_and_one_that_loses_its_worker(syncer: Start, join: Join) -> None:
    """N28, N33, N34: a dead worker ends the run with exit 1, the file at the path stays."""
    options = ("--quorum", "1", "--iso-backend", "torch-svd", "--checkpoint-every", "1")
    process = syncer(*options, "--total-steps", "2", *PLAIN)
    client = join(process, layout=iso_layout())
    client.init(INIT)
    drive([client])
    assert process.wait() == 0
    header = process.checkpoint.read_bytes()
    assert header[4] == 1  # K1: the backend byte
    again = syncer(*options, "--total-steps", "9", "--resume", *PLAIN)
    workers = [
        pid
        for pid in children(again.pid)
        if b"syncer.svd.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 1
    second = join(again, layout=iso_layout())
    second.expect(Broadcast)
    os.kill(workers[0], signal.SIGKILL)
    assert again.wait() == 1
    assert "SVD worker on cpu" in again.stderr.splitlines()[-1]
    assert again.checkpoint.read_bytes() == header
