"""Budget mode and everything that voids it, against a real `yeto-syncer` (C70 to C75, L40, L41).

Void means: exit 1, one line that says why, and no cutoff checkpoint.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoint.inspection import inspect_file
from syncer.tape import CommitRecord, EventRecord, read_commits, read_tape
from tests.system.client import Client, Syncer, drive, frame
from wire.messages import Broadcast, BudgetDone, FinalManifest, PullRequest

Start = Callable[..., Syncer]
Join = Callable[..., Client]
INIT = [np.arange(6, dtype=np.float32), np.full(4, -1.0, np.float32)]
BUDGET = 10
BUDGET_FLAGS = ("--learners", "2", "--quorum", "2", "--learner-budget-steps", str(BUDGET))


def start_two(syncer: Start, join: Join, *flags: str) -> tuple[Syncer, list[Client]]:
    """Both learners in RUN, round 1 launched."""
    process = syncer(*BUDGET_FLAGS, *flags)
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    for client in clients:
        client.expect(PullRequest)
    return process, clients


def assert_void(process: Syncer, reason: str) -> None:
    assert process.wait() == 1
    last = process.stderr.strip().splitlines()[-1]
    assert reason in last
    assert not process.checkpoint.exists()
    assert "cutoff checkpoint written" not in process.stderr
    assert not any(
        isinstance(record, EventRecord) and record.event == "cutoff"
        for record in read_tape(process.tape)
    )


def test_the_first_report_cancels_whole_rounds_and_nothing_follows(
    syncer: Start, join: Join
) -> None:
    """C72, C74: an answer accepted before the report is gone with its round; no manifest, no
    SHUTDOWN, no ERROR; the checkpoint is the last committed cut, unmarked."""
    process = syncer(*BUDGET_FLAGS, "--pipeline", "2")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    drive(clients, until=lambda: all(client.versions.get(1, 0) >= 2 for client in clients))
    one, two = clients
    pull = one.expect(PullRequest)
    while pull.step < 3:
        pull = one.expect(PullRequest)
    one.push(pull, np.ones(INIT[pull.fragment].size, np.float32))
    one.send(BudgetDone(BUDGET))
    seen = max(two.versions.values())
    two.heartbeat()
    two.send(BudgetDone(BUDGET))
    assert {client.until_end() for client in clients} == {"eof"}
    assert process.wait() == 0
    assert not any(isinstance(m, FinalManifest) for client in clients for m in client.received)
    file = inspect_file(process.checkpoint)
    step = file.structure.header.global_step
    assert not file.names.marker.exists()
    assert not list(file.problems())
    records = list(read_tape(process.tape))
    assert [r.step for r in records if isinstance(r, CommitRecord)] == list(range(1, step + 1))
    assert max(seen, *two.versions.values()) <= step
    discarded = [
        r for r in records if isinstance(r, EventRecord) and r.event == "attempt_discarded"
    ]
    assert discarded
    assert all(r.fields["reason"] == "cutoff" and r.fields["round"] > step for r in discarded)
    (cutoff,) = (r for r in records if isinstance(r, EventRecord) and r.event == "cutoff")
    assert cutoff.fields["checkpoint_step"] == step
    assert [member["id"] for member in cutoff.fields["members"]] == [0, 1]


def test_a_duplicate_report_voids_the_run(syncer: Start, join: Join) -> None:
    process, clients = start_two(syncer, join)
    clients[0].send(BudgetDone(BUDGET))
    clients[0].send(BudgetDone(BUDGET))
    assert_void(process, "learner 0 sent a second budget report")


def test_a_duplicate_from_a_new_connection_voids_the_run(syncer: Start, join: Join) -> None:
    """C71: the first of that id, whatever its generation."""
    process, clients = start_two(syncer, join)
    clients[0].send(BudgetDone(BUDGET))
    clients[0].close()
    again = join(process, 0)
    again.send(BudgetDone(BUDGET))
    assert_void(process, "learner 0 sent a second budget report")


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<Q", BUDGET + 1),
        struct.pack("<Q", BUDGET - 1),
        struct.pack("<Q", 0),
        struct.pack("<Q", BUDGET) + b"\0",
        struct.pack("<I", BUDGET),
        b"",
    ],
    ids=["one-more", "one-less", "zero", "trailing-byte", "four-bytes", "empty"],
)
@pytest.mark.parametrize("first", [True, False], ids=["gate-open", "gate-closed"])
def test_a_wrong_report_voids_the_run(
    syncer: Start, join: Join, payload: bytes, first: bool
) -> None:
    process, clients = start_two(syncer, join)
    if not first:
        clients[1].send(BudgetDone(BUDGET))
    clients[0].send_raw(frame(14, payload))
    assert_void(process, "learner 0 sent a budget report")


def test_a_report_from_a_superseded_generation_voids_the_run(syncer: Start, join: Join) -> None:
    process, clients = start_two(syncer, join)
    newer = join(process, 0)
    newer.expect(Broadcast)
    clients[0].send(BudgetDone(BUDGET))
    assert_void(process, "superseded generation")


def test_an_expired_lease_voids_the_run(syncer: Start, join: Join) -> None:
    """C73: whoever neither reports nor gives a sign of life for the quorum timeout."""
    process, clients = start_two(syncer, join, "--quorum-timeout-s", "1")
    started = time.monotonic()
    clients[0].send(BudgetDone(BUDGET))
    assert_void(process, "learner 1 gave no sign of life")
    assert time.monotonic() - started >= 1


def test_heartbeats_renew_a_lease_and_a_late_report_counts(syncer: Start, join: Join) -> None:
    """C73, C74: twice the timeout passes before the second report."""
    process, clients = start_two(syncer, join, "--quorum-timeout-s", "2")
    clients[0].send(BudgetDone(BUDGET))
    end = time.monotonic() + 4
    while (left := end - time.monotonic()) > 0:
        clients[1].heartbeat()
        clients[1].poll(min(left, 0.2))
        assert clients[1].ended is None
    clients[1].send(BudgetDone(BUDGET))
    assert process.wait() == 0
    assert inspect_file(process.checkpoint).structure.header.global_step == 0


def test_a_reconnecting_learner_is_registered_and_gets_nothing(syncer: Start, join: Join) -> None:
    """C73: after the gate has closed there is no broadcast and no PULL, but a report counts."""
    process, clients = start_two(syncer, join)
    clients[0].send(BudgetDone(BUDGET))
    clients[1].close()
    again = join(process, 1)
    assert again.poll(0.3) == []
    again.send(BudgetDone(BUDGET))
    assert again.until_end() == "eof"
    assert again.received == []
    assert process.wait() == 0
    assert read_commits(process.tape) == []


def test_a_report_when_the_mode_is_off_costs_only_its_sender(syncer: Start, join: Join) -> None:
    """C86: a fault of that connection; the others finish the run."""
    process = syncer("--quorum", "1", "--total-steps", "4", "--min-round-interval-ms", "50")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    clients[1].expect(Broadcast)
    clients[1].send(BudgetDone(BUDGET))
    text = clients[1].until_end()
    assert "budget" in text.lower()
    drive(clients[:1])
    assert clients[0].ended == "SHUTDOWN"
    assert process.wait() == 0


def test_all_rounds_without_a_report_is_a_failure_with_a_checkpoint(
    syncer: Start, join: Join
) -> None:
    """C75: T reached without any report."""
    process = syncer(*BUDGET_FLAGS, "--total-steps", "2")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    drive(clients)
    assert process.wait() == 1
    file = inspect_file(process.checkpoint)
    assert file.structure.header.global_step == 2
    assert not file.names.marker.exists()


def test_a_signal_in_budget_mode(syncer: Start, join: Join) -> None:
    """C83: before the gate an unmarked checkpoint and exit 1; the learners are told."""
    process, clients = start_two(syncer, join)
    process.signal()
    assert clients[0].until_end().startswith("stopped")
    assert process.wait() == 1
    assert process.checkpoint.exists()
    assert not Path(f"{process.checkpoint}.final").exists()


def test_cutoff_and_consolidation_by_hand(syncer: Start, join: Join) -> None:
    """C76, L41, L42: frozen learners answer every fragment once more with the budget's counters."""
    process = syncer(*BUDGET_FLAGS, "--checkpoint-every", "0")
    clients = [join(process, number) for number in range(2)]
    clients[0].init(INIT)
    drive(clients, until=lambda: all(client.versions.get(0, 0) >= 3 for client in clients))
    for client in clients:
        client.send(BudgetDone(BUDGET))
    assert process.wait() == 0
    cut = inspect_file(process.checkpoint).structure.header.global_step
    assert cut >= 3

    again = syncer(
        *("--learners", "2", "--quorum", "2", "--total-steps", str(cut + 2), "--resume"),
        *("--mark-final-checkpoint", "--outer-lr", "1", "--outer-momentum", "0"),
        *("--delta-correction", "none", "--port", str(process.port)),
    )
    assert again.port == process.port
    frozen = [np.full(6, 10.0, np.float32), np.full(4, 20.0, np.float32)]
    fresh = [join(again, number) for number in range(2)]
    seen = [client.expect(Broadcast) for client in fresh for _ in range(2)]
    assert {message.version for message in seen} == {
        head.version for head in inspect_file(again.checkpoint).structure.fragments
    }
    for client in fresh * 2:
        pull = client.expect(PullRequest)
        client.local_step = 0
        delta = frozen[pull.fragment] - client.params[pull.fragment]
        client.push(pull, delta, steps=BUDGET, tokens=1000)
    drive(fresh)
    assert again.wait() == 0
    assert Path(f"{again.checkpoint}.final").read_text().endswith(f"global_step={cut + 2}\n")
    late = [record for record in read_commits(again.tape) if record.step > cut]
    assert [record.step for record in late] == [cut + 1, cut + 2]
    for record in late:
        assert [(r.id, r.c_steps, r.c_tokens) for r in record.responders] == [
            (0, BUDGET, 1000), (1, BUDGET, 1000),
        ]  # fmt: skip
    for fragment, values in enumerate(frozen):
        np.testing.assert_allclose(fresh[0].final[fragment], values, rtol=1e-5)
