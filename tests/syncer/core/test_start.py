"""HELLO steps 10 to 14, the INIT set, the start barrier and W19."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.snapshot import LedgerEntry
from syncer import commands as c
from syncer import events as e
from syncer.coordinator import Phase
from syncer.events import Member
from tests.syncer.core.harness import PROFILE, Driver, FakeResume, of_type
from wire.dtypes import DType
from wire.errors import ErrorCode

OTHER = b"x" * 32


def refusal(commands: list[c.Command]) -> ErrorCode:
    (refuse,) = of_type(commands, c.RefuseHello)
    assert not of_type(commands, c.AcceptHello)
    return refuse.error.code


def broadcasts(commands: list[c.Command]) -> list[tuple[int, int, tuple[Member, ...]]]:
    return [(b.fragment, b.version, b.members) for b in of_type(commands, c.SendBroadcast)]


# ---- W12 steps 10 to 14


def test_w12_10_an_offered_profile_is_always_checked() -> None:
    driver = Driver()
    assert refusal(driver.join(0, profile=OTHER)) is ErrorCode.PROFILE_MISMATCH
    assert driver.core.session is None, "W13: a refused HELLO fixes nothing"
    assert of_type(driver.join(0, profile=PROFILE), c.AcceptHello)


def test_w12_10_binding_required() -> None:
    driver = Driver(require_profile=True)
    assert refusal(driver.join(0)) is ErrorCode.PROFILE_REQUIRED


def test_w12_11_one_rate_per_fragment() -> None:
    driver = Driver(fragments=2, outer_lr_by_fragment=(0.1, 0.2, 0.3))
    assert refusal(driver.join(0)) is ErrorCode.FRAGMENT_COUNT


def test_w12_12_comes_before_13(k18_resume: FakeResume) -> None:
    driver = Driver(fragments=2, resumed=k18_resume)
    driver.join(0)
    assert refusal(driver.join(1, contract=OTHER)) is ErrorCode.CHECKPOINT_MISMATCH
    driver.init()
    assert driver.phase is Phase.RUN
    text = driver.join(1, contract=OTHER)
    assert refusal(text) is ErrorCode.CHECKPOINT_MISMATCH, "also once the tensors are installed"
    assert refusal(driver.join(1, dtype=DType.BF16)) is ErrorCode.SESSION_MISMATCH
    # What the checkpoint does not state, as a V2 file may, is the session's alone.
    assert refusal(driver.join(1, fingerprint=OTHER)) is ErrorCode.SESSION_MISMATCH


@pytest.fixture
def k18_resume() -> FakeResume:
    return FakeResume(5, 2, {0: LedgerEntry(5, 5, 50)})


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": DType.BF16},
        {"fingerprint": OTHER},
        {"contract": OTHER},
        {"profile": PROFILE},
    ],
)
def test_w12_13_a_later_hello_must_ask_for_the_same_session(change: dict[str, Any]) -> None:
    driver = Driver()
    driver.join(0)
    commands = driver.join(1, **change)
    assert refusal(commands) is ErrorCode.SESSION_MISMATCH
    (name,) = change
    (refuse,) = of_type(commands, c.RefuseHello)
    assert name in refuse.error.sentence


def test_p10_the_mismatch_names_both_fingerprints() -> None:
    driver = Driver()
    driver.join(0)
    (refuse,) = of_type(driver.join(1, fingerprint=OTHER), c.RefuseHello)
    assert OTHER.hex()[:16] in refuse.error.sentence
    assert (b"f" * 32).hex()[:16] in refuse.error.sentence


def test_w12_13_another_layout() -> None:
    driver = Driver(fragments=2)
    driver.join(0)
    driver.fragments = 3
    assert refusal(driver.join(1)) is ErrorCode.SESSION_MISMATCH


def test_w12_14_a_live_generation_is_not_replaced() -> None:
    driver = Driver()
    driver.join(0, generation=7)
    assert refusal(driver.join(0, generation=7)) is ErrorCode.DUPLICATE_GENERATION
    driver.leave(0, generation=7)
    assert of_type(driver.join(0, generation=7), c.AcceptHello)


def test_w12_14_a_generation_we_are_still_closing_is_taken() -> None:
    driver = Driver()
    driver.join(0, generation=7)
    driver.report(0, 5, generation=7)
    assert refusal(driver.join(0, generation=7)) is ErrorCode.DUPLICATE_GENERATION
    driver.leave(0, generation=7)
    assert of_type(driver.join(0, generation=7), c.AcceptHello)


# ---- W18, W19


def test_w18_the_first_accepted_hello_fixes_the_session() -> None:
    driver = Driver()
    driver.join(0, dtype=DType.Q4)
    assert driver.core.session is not None
    assert driver.core.session.dtype is DType.Q4


def test_w19_without_groups_an_uninitialized_session_is_forgotten() -> None:
    driver = Driver(fragments=2)
    driver.join(0)
    driver.init(fragments=[0])
    driver.leave(0)
    assert driver.core.session is None
    driver.join(0, generation=2, contract=OTHER)
    commands = driver.init(generation=2, fragments=[1])
    assert not of_type(commands, c.DecodeInit), "the partial set went with the session"
    driver.init(generation=2, fragments=[0])
    assert driver.phase is Phase.RUN


def test_w19_a_complete_set_keeps_the_session() -> None:
    driver = Driver(quorum=2)
    driver.join(0)
    driver.init()
    driver.leave(0)
    assert refusal(driver.join(0, generation=2, contract=OTHER)) is ErrorCode.SESSION_MISMATCH


def test_w19_a_resumed_run_forgets_until_the_barrier(k18_resume: FakeResume) -> None:
    driver = Driver(fragments=2, resumed=k18_resume, quorum=2)
    driver.join(0, dtype=DType.BF16)
    assert driver.step == 5
    driver.leave(0, 1)
    assert driver.core.session is None
    assert driver.step == 0
    driver.join(0, generation=2)
    driver.join(1)
    assert driver.phase is Phase.RUN
    for learner, generation in ((0, 2), (1, 1)):
        driver.leave(learner, generation)
    assert driver.core.session is not None


# ---- C5, C6


def test_c5_the_first_init_of_each_fragment_is_kept_and_the_set_frozen() -> None:
    driver = Driver(fragments=2, auto=False)
    driver.join(0)
    member = Member(0, 1)
    driver.send(e.InitReceived(member, 1, b"b"))
    driver.send(e.InitReceived(member, 1, b"repeated"))
    commands = driver.send(e.InitReceived(member, 0, b"a"))
    (decode,) = of_type(commands, c.DecodeInit)
    assert decode.tensors == (b"a", b"b")
    assert driver.core.dropped == {"init": 1}


def test_c5_a_newer_generation_starts_a_new_set() -> None:
    driver = Driver(fragments=2)
    driver.join(0)
    driver.init(fragments=[0])
    driver.join(0, generation=2)
    driver.init(generation=2, fragments=[1])
    assert driver.phase is Phase.INIT
    driver.init(generation=1, fragments=[0])
    assert driver.phase is Phase.INIT, "C6: the superseded generation no longer counts"
    driver.init(generation=2, fragments=[0])
    assert driver.phase is Phase.RUN


def test_c86_the_incomplete_set_of_a_closed_group_is_dropped() -> None:
    driver = Driver(fragments=2)
    driver.join(0)
    driver.join(1)
    driver.init(fragments=[0])
    driver.leave(0)
    driver.join(0, generation=2)
    driver.init(generation=2, fragments=[1])
    assert driver.phase is Phase.INIT


def test_c5_state_after_init_is_version_zero_with_zero_momentum() -> None:
    driver = Driver(fragments=2, checkpoint_every=1)
    driver.started(1)
    snapshot = driver.saves[0].snapshot
    assert snapshot.global_step == 0
    assert [state.version for state in snapshot.fragments] == [0, 0]
    assert all(not state.momentum.any() for state in snapshot.fragments)
    assert not snapshot.ledger


def test_c6_unwanted_inits_are_dropped_and_counted(k18_resume: FakeResume) -> None:
    driver = Driver().started(1)
    driver.init()
    assert driver.core.dropped == {"init": 1}
    resumed = Driver(fragments=2, resumed=k18_resume, quorum=2)
    resumed.join(0)
    resumed.init()
    assert resumed.core.dropped == {"init": 2}


# ---- C7, C8, C9


def test_c7_a_resumed_run_is_initialized_by_the_first_hello(k18_resume: FakeResume) -> None:
    driver = Driver(fragments=2, resumed=k18_resume, quorum=2)
    commands = driver.join(3)
    assert broadcasts(commands) == [(0, 5, (Member(3, 1),)), (1, 4, (Member(3, 1),))]
    driver.join(4)
    assert driver.phase is Phase.RUN
    assert of_type(driver.log, c.SendPull)[0].step == 6


def test_c8_the_barrier_counts_distinct_current_ids() -> None:
    driver = Driver(quorum=2)
    driver.started(1)
    driver.join(0, generation=2)
    assert driver.phase is Phase.INIT
    driver.push(0, 1, generation=2)
    driver.ack(0, 0, generation=2)
    assert driver.core.dropped == {"final_ack": 1}
    assert not of_type(driver.log, c.SendPull)
    commands = driver.join(1)
    assert driver.phase is Phase.RUN
    assert of_type(commands, c.SendPull)
    driver.push(1, 1)
    driver.push(0, 1, generation=2)
    assert driver.records()[0]["rejected"] == {"out_of_round": 1}, "the early PUSH is counted"


def test_c8_in_budget_mode_the_barrier_is_all_m() -> None:
    driver = Driver(quorum=1, learners=3, budget_steps=10).started(2)
    assert driver.phase is Phase.INIT
    driver.join(2)
    assert driver.phase is Phase.RUN


def at_total(ledger: tuple[int, ...], **config: Any) -> Driver:
    resume = FakeResume(6, 1, {i: LedgerEntry(6, 6, 60) for i in ledger})
    return Driver(resumed=resume, total_steps=6, quorum_timeout=30.0, **config)


def test_c8_at_the_last_step_every_id_of_the_ledger_is_awaited() -> None:
    driver = at_total((0, 2), mark_final=True)
    driver.join(0)
    driver.join(1)
    assert driver.phase is Phase.INIT
    driver.join(2)
    assert driver.phase is Phase.DELIVER
    assert not of_type(driver.log, c.SendBroadcast), "C9: no broadcast ever"
    assert not of_type(driver.log, c.RemoveMarker)
    assert not of_type(driver.log, c.SendPull)
    for learner in range(3):
        driver.ack(learner, 6)
    assert driver.finish.code == 0
    assert of_type(driver.log, c.WriteMarker)


def test_c8_at_the_last_step_patience_ends_with_the_quorum_timeout() -> None:
    driver = at_total((0, 7), quorum=2)
    driver.join(0)
    driver.wait(31)
    assert driver.phase is Phase.INIT, "one id is no quorum of two"
    driver.join(1)
    assert driver.phase is Phase.DELIVER


def test_c8_patience_begins_with_the_first_hello() -> None:
    driver = at_total((0, 7))
    driver.wait(1000)
    driver.join(0)
    driver.wait(29.9)
    assert driver.phase is Phase.INIT
    driver.wait(0.2)
    assert driver.phase is Phase.DELIVER


def test_c9_marker_then_version_zero_then_broadcast_in_that_order() -> None:
    driver = Driver(fragments=2, checkpoint_every=1, quorum=2, auto=False)
    driver.join(0)
    driver.init()
    assert not of_type(driver.log, c.RemoveMarker)
    driver.answer_all(c.DecodeInit)
    assert driver.open_of(c.RemoveMarker)
    driver.answer_all(c.RemoveMarker)
    (save,) = driver.open_of(c.SaveCheckpoint)
    assert save.kind is c.SaveKind.INITIAL
    assert not save.patch
    assert not of_type(driver.log, c.SendBroadcast)
    driver.join(5)
    commands = driver.answer_all(c.SaveCheckpoint)
    everyone = (Member(0, 1), Member(5, 1))
    assert broadcasts(commands) == [(0, 0, everyone), (1, 0, everyone)]
    assert driver.phase is Phase.RUN, "the barrier fell with the broadcast"


def test_c9_early_learners_get_the_model_before_the_barrier() -> None:
    driver = Driver(quorum=3)
    commands = driver.started(1).log
    assert broadcasts(commands) == [(0, 0, (Member(0, 1),))]
    assert broadcasts(driver.join(1)) == [(0, 0, (Member(1, 1),))], "C37 from then on"


def test_c9_no_initial_checkpoint_unless_every_is_one() -> None:
    driver = Driver(checkpoint_every=4).started(1)
    assert not driver.saves


# ---- P3


def test_p3_a_silent_learner_0_is_reported_once() -> None:
    def warnings(commands: list[c.Command]) -> list[str]:
        return [log.text for log in of_type(commands, c.Log) if "no INIT" in log.text]

    driver = Driver(fragments=2, handshake_timeout=10.0)
    driver.join(1)
    assert not warnings(driver.wait(60))
    driver.join(0)
    driver.wait(8)
    driver.init(fragments=[0])
    assert not warnings(driver.wait(9))
    assert len(warnings(driver.wait(2))) == 1
    assert not warnings(driver.wait(60))
    driver.init(fragments=[1])
    assert driver.phase is Phase.RUN
    assert not warnings(driver.wait(60)), "the model is there"
