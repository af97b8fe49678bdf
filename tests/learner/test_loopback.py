"""The whole learner over real sockets, against a scripted syncer."""

# ruff: noqa: PT012  what must raise here is a session, not one statement

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from learner import Learner, LearnerConfig
from learner import client as client_module
from learner.errors import (
    BudgetFailed,
    ConnectTimeout,
    FinalizationTimeout,
    Interrupted,
    LearnerError,
    NonFiniteParameters,
    ProtocolFault,
    SafetyStop,
    SyncerRefused,
)
from learner.events import BroadcastApplied, Finalizing, LinkDown, LinkUp, PushSent
from learner.parameters import Parameters, find_trainables
from tests.learner.scripted import PATIENCE_S, ScriptedSyncer, scripted_syncer, values
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.layout import NamedLayout
from wire.messages import (
    BudgetDone,
    FinalAck,
    FinalFragment,
    FinalManifest,
    InitParams,
    PushFragment,
)
from wire.tensors import encode


class Island:
    """A small model, two fragments, and a "training step" that adds known numbers."""

    def __init__(self, syncer: ScriptedSyncer | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential()
        self.model.add_module("embed", nn.Embedding(6, 4))
        self.model.add_module("body", nn.Linear(4, 5))
        self.events: list[Any] = []
        port = syncer.port if syncer is not None else options.pop("port")
        settings = {"wire_dtype": "f32", "streams": 2, "fragments": 2, **options}
        config = LearnerConfig(connect=f"127.0.0.1:{port}", **settings)
        self.learner = Learner(self.model, config, on_event=self.events.append)
        self.parameters = Parameters(find_trainables(self.model), self.learner.layout)

    def local(self, fragment: int) -> Tensor:
        return self.parameters.snapshot(fragment)

    def train(self, amount: float = 0.125) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.model.parameters()):
                parameter.add_(amount * (index + 1))

    def step(self, tokens: int = 64) -> Any:
        self.train()
        return self.learner.step(tokens=tokens)

    def step_until(self, done: Callable[[Any], bool], limit_s: float = PATIENCE_S) -> Any:
        """Boundaries without training until the network has brought what the test waits for."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            info = self.learner.step(tokens=0)
            if done(info):
                return info
            threading.Event().wait(0.005)
        raise AssertionError(f"it did not happen within {limit_s} s")

    @property
    def pending_pulls(self) -> int:
        return self.learner._core.shared.session.pending_pulls

    def numels(self) -> tuple[int, ...]:
        return self.parameters.numels


def until(done: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def anchored(island: Island, syncer: ScriptedSyncer, version: int = 0) -> list[Tensor]:
    """Send and apply a broadcast of every fragment; returns their values."""
    tensors = [values(n, version + i) for i, n in enumerate(island.numels())]
    for fragment, tensor in enumerate(tensors):
        syncer.broadcast(fragment, version, tensor)
    seen: set[int] = set()
    island.step_until(lambda info: (seen.update(info.applied), len(seen) == len(tensors))[1])
    return tensors


@pytest.fixture
def syncer() -> Any:
    with scripted_syncer() as scripted:
        yield scripted


@pytest.mark.parametrize("streams", [0, 3])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
def test_a_whole_life(syncer: ScriptedSyncer, dtype: str, streams: int, tmp_path: Path) -> None:
    """INIT, broadcast, blend, PULL → PUSH to the bit, final cut, ACK, SHUTDOWN."""
    island = Island(syncer, wire_dtype=dtype, streams=streams, alpha=0.25, output_dir=tmp_path)
    start = [island.local(f) for f in range(2)]
    with island.learner as sync:
        hello = syncer.accepted()
        assert (hello.learner_id, hello.num_streams, hello.dtype.label) == (0, streams, dtype)
        assert hello.fingerprint == hello.contract == sync.layout.fingerprint
        inits = {m.fragment: m for m in (syncer.expect(InitParams) for _ in range(2))}
        for fragment in range(2):
            expected = bytes(encode(start[fragment], hello.dtype.bulk))
            assert bytes(inits[fragment].tensor) == expected

        syncer.pull(0, 1)
        assert island.step().pushed == ()
        before = [island.local(f) for f in range(2)]
        tensors = anchored(island, syncer)
        for fragment in range(2):
            mixed = (
                np.float32(0.25) * before[fragment].numpy()
                + np.float32(0.75) * tensors[fragment].numpy()
            )
            assert island.local(fragment).numpy().tobytes() == mixed.tobytes()

        info = island.step(tokens=32)
        pushed = set(info.pushed)
        push = syncer.expect(PushFragment)
        assert (push.fragment, push.step, push.attempt, push.base_version) == (0, 1, 1, 0)
        assert push.local_step <= sync.local_step
        assert push.c_steps >= 1
        if pushed:
            assert push.c_tokens == 32
            delta = island.local(0) - tensors[0]
            assert bytes(push.tensor) == bytes(encode(delta, hello.dtype))

        final = [torch.randn(n) for n in island.numels()]
        syncer.cut(9, (9, 8), final)
        info = island.step_until(lambda info: info.stop)
        assert info.finalizing
        assert syncer.expect(FinalAck).step == 9
        for fragment in range(2):
            assert torch.equal(island.local(fragment), final[fragment])
        path = sync.save_result()
        syncer.shutdown()
        sync.finish()
    assert syncer.quiet()

    result = sync.result
    assert result is not None
    assert (result.step, result.versions, result.acknowledged) == (9, (9, 8), True)
    saved = load_file(path)
    for fragment in range(2):
        for slot in island.parameters.slots(fragment):
            assert torch.equal(saved[slot.name], slot.of(final[fragment]))
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["step"] == 9
    assert document["fingerprint"] == sync.layout.fingerprint.hex()
    layout = NamedLayout.from_json((tmp_path / "layout.json").read_text())
    assert layout == sync.layout
    kinds = [type(event) for event in island.events]
    assert kinds[0] is LinkUp
    assert kinds.count(BroadcastApplied) == 2
    assert Finalizing in kinds
    assert sync.counters.merges_applied == 2
    assert sync.counters.pushes == kinds.count(PushSent) == 1
    assert sync.counters.push_bytes == len(push.tensor)
    assert sync.counters.received_bytes > 0


def test_only_learner_0_sends_init(syncer: ScriptedSyncer) -> None:
    """L14."""
    island = Island(syncer, learner_id=3)
    with island.learner:
        assert syncer.accepted().learner_id == 3
        anchored(island, syncer)
        assert syncer.quiet()


def test_redial_sends_init_again_until_every_fragment_came(syncer: ScriptedSyncer, fast) -> None:
    """L14, W3: identical bytes, another generation; L12: training went on."""
    island = Island(syncer)
    with island.learner as sync:
        first = syncer.accepted().generation
        before = [bytes(syncer.expect(InitParams).tensor) for _ in range(2)]
        island.step()
        syncer.broadcast(0, 0, values(island.numels()[0], 1))
        island.step_until(lambda info: info.applied == (0,))
        syncer.drop()
        second = syncer.accepted().generation
        assert second not in (0, first)
        again = [bytes(syncer.expect(InitParams).tensor) for _ in range(2)]
        assert sorted(again) == sorted(before)
        syncer.broadcast(1, 0, values(island.numels()[1], 1))
        island.step_until(lambda info: info.applied == (1,))
        syncer.drop()
        syncer.accepted()
        island.step_until(lambda info: info.connected)
        assert syncer.quiet()
        assert sync.counters.redials == 2
    links = [e for e in island.events if isinstance(e, LinkUp | LinkDown)]
    assert [type(e) for e in links] == [LinkUp, LinkDown, LinkUp, LinkDown, LinkUp]


def test_push_survives_nothing_of_an_old_generation(syncer: ScriptedSyncer, fast) -> None:
    """L12, L22: pending PULLs die with the group; the anchor does not."""
    island = Island(syncer, learner_id=1)
    with island.learner:
        syncer.accepted()
        tensors = anchored(island, syncer, version=4)
        syncer.pull(0, 5)
        until(lambda: island.pending_pulls == 1)
        syncer.drop()
        syncer.accepted()
        syncer.broadcast(0, 4, tensors[0])
        syncer.broadcast(1, 4, tensors[1])
        island.step_until(lambda info: info.connected)
        island.step()
        assert syncer.quiet()
        syncer.pull(0, 5, 2)
        island.step_until(lambda info: info.pushed == (0,))
        push = syncer.expect(PushFragment)
        assert (push.step, push.attempt, push.base_version) == (5, 2, 4)
        assert bytes(push.tensor) == bytes(encode(island.local(0) - tensors[0], DType.F32))
        assert island.learner.counters.replayed_broadcasts == 2


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redials after a hundredth of the real pause; the real constants are L11's own test."""
    real = client_module.backoff
    monkeypatch.setattr(client_module, "backoff", lambda uniform: (p / 100 for p in real(uniform)))


def test_error_is_fatal_at_the_next_boundary(syncer: ScriptedSyncer) -> None:
    """L13."""
    island = Island(syncer)
    with pytest.raises(SyncerRefused, match="stopped: the operator ended it"), island.learner:
        syncer.accepted()
        syncer.error("the operator ended it")
        island.step_until(lambda info: False)
    assert syncer.hellos.empty()


def test_refused_hello_is_fatal_at_once(syncer: ScriptedSyncer) -> None:
    """L13, W40: the text of the syncer reaches the user; no redial."""
    syncer.refusal = ProtocolError(ErrorCode.SESSION_MISMATCH, "fingerprint 0123 is not 4567")
    island = Island(syncer, streams=4)
    text = "session-mismatch: fingerprint 0123"
    with pytest.raises(SyncerRefused, match=text) as refused, island.learner:
        island.step_until(lambda info: False)
    assert refused.value.exit_code == 1


def test_conflicting_bytes_are_fatal(syncer: ScriptedSyncer) -> None:
    """L24."""
    island = Island(syncer)
    with pytest.raises(ProtocolFault, match="twice with different bytes"), island.learner:
        syncer.accepted()
        tensors = anchored(island, syncer)
        syncer.broadcast(0, 0, tensors[0] + 1)
        island.step_until(lambda info: False)


def test_faults_of_the_syncer_are_fatal(syncer: ScriptedSyncer) -> None:
    """W40: a frame the protocol forbids."""
    island = Island(syncer)
    with pytest.raises(ProtocolFault, match="broke the protocol"), island.learner:
        syncer.accepted()
        syncer.control(BudgetDone(3))
        island.step_until(lambda info: False)


def test_non_finite_values_are_named_and_never_sent(syncer: ScriptedSyncer) -> None:
    """L27."""
    island = Island(syncer, learner_id=2)
    with pytest.raises(NonFiniteParameters, match=r"'body\.weight' of fragment 1"), island.learner:
        syncer.accepted()
        anchored(island, syncer)
        with torch.no_grad():
            island.model.body.weight[1, 1] = float("nan")
        syncer.pull(1, 1)
        island.step_until(lambda info: False)
    assert syncer.quiet()


def test_non_finite_start_is_refused_before_dialling(syncer: ScriptedSyncer) -> None:
    """L27: INIT of learner 0."""
    island = Island(syncer)
    with torch.no_grad():
        island.model.embed.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteParameters, match=r"embed\.weight"):
        island.learner.start()
    assert syncer.hellos.empty()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_the_learner_may_come_before_the_syncer(caplog, monkeypatch) -> None:
    """L11: it says so in one line, and connects when the syncer comes."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.05)
    caplog.set_level(logging.INFO, "learner")
    port = free_port()
    island = Island(None, port=port)
    started = threading.Thread(target=island.learner.start)
    started.start()
    until(lambda: "waiting for the syncer" in caplog.text)
    with scripted_syncer(port) as syncer:
        syncer.accepted()
        started.join(PATIENCE_S)
        assert not started.is_alive()
        island.learner.close()
    lines = [r.message for r in caplog.records if "waiting for the syncer" in r.message]
    assert len(lines) == 1
    assert f"127.0.0.1:{port}" in lines[0]


def test_nobody_there_is_an_error_in_the_end(monkeypatch) -> None:
    """L11: connect_timeout_s."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.05)
    island = Island(None, port=free_port(), connect_timeout_s=0.2)
    with pytest.raises(ConnectTimeout, match=r"no syncer at 127\.0\.0\.1"), island.learner:
        pass


def test_an_outage_is_said_once(caplog, fast) -> None:
    """L12: lost once, regained once, however many redials fail."""
    caplog.set_level(logging.INFO, "learner")
    with scripted_syncer() as syncer:
        island = Island(syncer, learner_id=1)
        island.learner.start()
        syncer.accepted()
        anchored(island, syncer, version=3)
        port = syncer.port
    for _ in range(20):
        island.step()
        threading.Event().wait(0.01)
    with scripted_syncer(port) as syncer:
        syncer.accepted()
        island.step_until(lambda info: info.connected)
        # The progress is not lost: the next PULL is answered from the old anchor.
        syncer.pull(0, 9)
        island.step_until(lambda info: info.pushed == (0,))
        push = syncer.expect(PushFragment)
        assert push.base_version == 3
        assert push.c_steps > 20
        island.learner.close()
    said = [r.message for r in caplog.records if r.name.startswith("learner")]
    assert sum("lost" in line for line in said) == 1
    assert sum("regained" in line for line in said) == 1


def test_redial_pauses_double_up_to_30_s_with_jitter() -> None:
    """L11."""
    middle = list(itertools.islice(client_module.backoff(lambda low, high: (low + high) / 2), 8))
    assert middle == [1, 2, 4, 8, 16, 30, 30, 30]
    low = list(itertools.islice(client_module.backoff(lambda low, high: low), 2))
    assert low == [0.8, 1.6]


def test_reconnect_in_finalization(syncer: ScriptedSyncer, fast) -> None:
    """L32: the group closes before the cut is complete; ACK goes out on the next one."""
    island = Island(syncer, learner_id=1)
    final = [torch.randn(n) for n in island.numels()]
    with island.learner as sync:
        syncer.accepted()
        anchored(island, syncer)
        syncer.control(FinalManifest(6, (6, 5)))

        def rest() -> None:
            syncer.drop()
            syncer.accepted()
            syncer.cut(6, (6, 5), final)

        later = threading.Thread(target=rest)
        later.start()
        island.step_until(lambda info: info.stop)
        later.join()
        assert syncer.expect(FinalAck).step == 6
        # After the ACK was accepted the group breaks once more: ACK again, then SHUTDOWN.
        syncer.drop()
        syncer.accepted()
        syncer.cut(6, (6, 5), final)
        assert syncer.expect(FinalAck).step == 6
        syncer.shutdown()
        sync.finish()
    assert all(torch.equal(island.local(f), final[f]) for f in range(2))


def test_shutdown_before_the_cut_is_fatal(syncer: ScriptedSyncer) -> None:
    """L33."""
    island = Island(syncer)
    with pytest.raises(ProtocolFault, match="SHUTDOWN"), island.learner:
        syncer.accepted()
        syncer.shutdown()
        island.step_until(lambda info: False)


def test_error_after_the_ack_keeps_what_was_saved(syncer: ScriptedSyncer, tmp_path: Path) -> None:
    """L34."""
    island = Island(syncer)
    final = [torch.randn(n) for n in island.numels()]
    with pytest.raises(SyncerRefused, match="did not complete"), island.learner as sync:
        syncer.accepted()
        syncer.cut(2, (2, 1), final)
        island.step_until(lambda info: info.stop)
        path = sync.save_result(tmp_path)
        syncer.error("another learner is missing")
    assert path.exists()


def test_syncer_gone_after_the_ack_is_a_warning(syncer, caplog, monkeypatch) -> None:
    """L34: redials refused for the farewell time end the run well."""
    monkeypatch.setattr(client_module, "FAREWELL_S", 0.3)
    with scripted_syncer() as other:
        island = Island(other)
        island.learner.start()
        other.accepted()
        other.cut(2, (2, 1), [torch.randn(n) for n in island.numels()])
        island.step_until(lambda info: info.stop)
    island.learner.finish()
    island.learner.close()
    assert "leaving without its SHUTDOWN" in caplog.text


def test_late_cut_lists_what_is_missing(syncer: ScriptedSyncer) -> None:
    """L30."""
    island = Island(syncer, final_timeout_s=0.2)
    text = "fragment 1 wants version 4 and has None"
    with pytest.raises(FinalizationTimeout, match=text), island.learner:
        syncer.accepted()
        syncer.control(FinalManifest(5, (0, 4)))
        syncer.bulk(FinalFragment(0, 0, bytes(4 * island.numels()[0])))
        island.step_until(lambda info: False)


def test_nothing_to_save_without_the_cut(syncer: ScriptedSyncer, tmp_path: Path) -> None:
    """L35."""
    island = Island(syncer)
    with island.learner as sync, pytest.raises(LearnerError, match="no final cut"):
        sync.save_result(tmp_path)


def test_leaving_early_closes_the_group(syncer: ScriptedSyncer) -> None:
    """L70."""
    island = Island(syncer)
    with island.learner:
        syncer.accepted()
        island.step()
    assert syncer.closed.get(timeout=PATIENCE_S)
    assert island.learner.result is None


def test_safety_stop(syncer: ScriptedSyncer) -> None:
    island = Island(syncer, max_local_steps=3)
    with pytest.raises(SafetyStop), island.learner:
        for _ in range(3):
            island.step()
    assert island.learner.local_step == 3


def test_request_stop_saves_and_leaves(syncer: ScriptedSyncer, tmp_path: Path) -> None:
    """L54."""
    island = Island(syncer, state_dir=tmp_path, learner_id=1)
    with pytest.raises(Interrupted) as stopped, island.learner as sync:
        syncer.accepted()
        tensors = anchored(island, syncer, version=3)
        island.step()
        sync.request_stop()
        island.step()
    assert stopped.value.exit_code == 1
    assert syncer.closed.get(timeout=PATIENCE_S)
    assert (tmp_path / f"step-{sync.local_step}").is_dir()

    # L52: a new process, the same broadcast: no blend, no counter reset.
    again = Island(syncer, state_dir=tmp_path, learner_id=1)
    with again.learner as resumed:
        syncer.accepted()
        assert resumed.local_step == sync.local_step
        assert all(torch.equal(again.local(f), island.local(f)) for f in range(2))
        for fragment, tensor in enumerate(tensors):
            syncer.broadcast(fragment, 3, tensor)
        syncer.pull(0, 4)
        again.step_until(lambda info: info.pushed == (0,))
        push = syncer.expect(PushFragment)
        assert push.base_version == 3
        since = next(
            e.local_step
            for e in island.events
            if isinstance(e, BroadcastApplied) and e.fragment == 0
        )
        assert push.c_steps == push.local_step - since
        assert bytes(push.tensor) == bytes(encode(again.local(0) - tensors[0], DType.F32))


def test_request_stop_ends_the_first_wait() -> None:
    """L54: also while nobody is there."""
    island = Island(None, port=free_port())
    timer = threading.Timer(0.2, island.learner.request_stop)
    timer.start()
    with pytest.raises(Interrupted), island.learner:
        pass


def test_heartbeats(syncer: ScriptedSyncer) -> None:
    """W42: at a boundary when the last one is old enough."""
    island = Island(syncer, learner_id=1)
    with island.learner:
        syncer.accepted()
        island.step()
        island.step_until(lambda info: bool(syncer.heartbeats))
        assert syncer.heartbeats[0].learner_id == 1
        assert syncer.heartbeats[0].local_step >= 1
        count = len(syncer.heartbeats)
        for _ in range(20):
            island.step()
        assert len(syncer.heartbeats) <= count + 1


def test_budget_run(syncer: ScriptedSyncer, fast) -> None:
    """Section 5: report, restart of the syncer, answers from the frozen model, final cut."""
    island = Island(syncer, learner_id=1, learner_budget_steps=3, wire_dtype="bf16")
    final = [torch.randn(n) for n in island.numels()]
    with island.learner as sync:
        syncer.accepted()
        for fragment, numel in enumerate(island.numels()):
            syncer.broadcast(fragment, 10, values(numel, fragment))
        for _ in range(3):
            island.step(tokens=32)
        frozen = [island.local(f) for f in range(2)]

        def consolidate() -> None:
            assert syncer.expect(BudgetDone).steps == 3
            # Ignored: the connection that carried the report (L41).
            syncer.pull(0, 11)
            syncer.drop()
            syncer.accepted()
            bases = [values(n, 77 + i) for i, n in enumerate(island.numels())]
            for fragment in (1, 0):
                syncer.pull(fragment, 4 + fragment)
            for fragment, base in enumerate(bases):
                syncer.broadcast(fragment, 3, base)
            pushes = {p.fragment: p for p in (syncer.expect(PushFragment) for _ in range(2))}
            for fragment, base in enumerate(bases):
                push = pushes[fragment]
                assert (push.step, push.base_version) == (4 + fragment, 3)
                assert (push.local_step, push.c_steps, push.c_tokens) == (3, 3, 96)
                expected = encode(frozen[fragment] - base, DType.BF16)
                assert bytes(push.tensor) == bytes(expected)
            syncer.cut(5, (4, 5), final)
            assert syncer.expect(FinalAck).step == 5
            syncer.shutdown()

        failures: list[BaseException] = []
        script = threading.Thread(target=guarded(consolidate, failures))
        script.start()
        result = sync.finish_budget()
        script.join(PATIENCE_S)
        assert failures == []
        assert result.step == 5
        sync.finish()
    assert all(torch.equal(island.local(f), final[f]) for f in range(2))


def guarded(script: Callable[[], None], failures: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            script()
        except BaseException as error:
            failures.append(error)

    return run


def test_budget_without_progress(syncer: ScriptedSyncer) -> None:
    """L43."""
    island = Island(syncer, learner_budget_steps=1, final_timeout_s=0.3)
    with pytest.raises(BudgetFailed, match="no progress"), island.learner as sync:
        island.step()
        sync.finish_budget()


def test_budget_counts_exactly(syncer: ScriptedSyncer) -> None:
    """L40."""
    island = Island(syncer, learner_budget_steps=2)
    with island.learner as sync:
        island.step()
        with pytest.raises(BudgetFailed, match="exactly"):
            sync.finish_budget()
        island.step()
        with pytest.raises(BudgetFailed, match="finish_budget"):
            island.step()


def test_baseline_only_counts() -> None:
    """L70: connect="none"."""
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    config = LearnerConfig(connect="none", max_local_steps=3)
    with Learner(model, config) as sync:
        infos = [sync.step(tokens=5) for _ in range(3)]
    assert [info.stop for info in infos] == [False, False, True]
    assert (sync.local_step, sync.units) == (3, 15)
    assert torch.equal(model.weight, before)
    assert sync.result is None
