"""The learner's session core: one test per rule, then a machine that plays a whole run."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from learner.fragments import Anchor, Received, Verdict
from learner.session import Mode, Session
from wire.errors import ProtocolError
from wire.messages import FinalManifest, PullRequest

G1, G2, G3 = 11, 22, 33


def got(version: int, values: str = "x") -> Received[str]:
    return Received(version, values.encode(), f"{values}@{version}")


def boundary(session: Session[str], tokens: int = 10) -> tuple[list, list]:
    """One optimizer step and its boundary, as the loop does it (L20)."""
    session.advance(tokens)
    due = session.take_broadcasts()
    for apply in due:
        session.applied(apply, apply.received.values)
    return due, session.take_answers()


def training(count: int = 2) -> Session[str]:
    """A session on generation G1 with every fragment anchored at version 0."""
    session: Session[str] = Session(count)
    session.connected(G1)
    for fragment in range(count):
        session.broadcast(G1, fragment, got(0))
    boundary(session)
    return session


def test_pull_waits_for_an_anchor_and_for_progress() -> None:
    """L23: no anchor, then c_steps = 0, then the answer with the counters of L21."""
    session: Session[str] = Session(1)
    session.connected(G1)
    assert session.pull(G1, PullRequest(0, 1, 1))
    assert boundary(session, 64)[1] == []
    session.broadcast(G1, 0, got(0))
    applied, answers = boundary(session, 64)
    assert [a.fragment for a in applied] == [0]
    assert answers == []
    (answer,) = boundary(session, 32)[1]
    assert (answer.base_version, answer.local_step) == (0, 3)
    assert (answer.c_steps, answer.c_tokens) == (1, 32)
    assert answer.anchor == "x@0"
    assert session.pending_pulls == 0


def test_staleness_is_that_of_the_fragment_that_waits_the_longest() -> None:
    """Own steps since its broadcast was applied; without one, all of them."""
    session: Session[str] = Session(2)
    session.connected(G1)
    boundary(session)
    session.broadcast(G1, 0, got(0))
    boundary(session)
    assert session.stale_steps == 2
    session.broadcast(G1, 1, got(0))
    boundary(session)
    assert session.stale_steps == 1
    boundary(session)
    assert session.stale_steps == 2


def test_a_push_resets_no_counter() -> None:
    """L21."""
    session = training(1)
    for step in (1, 2):
        session.pull(G1, PullRequest(0, step, 1))
        (answer,) = boundary(session)[1]
        assert answer.c_steps == step


def test_newer_attempt_replaces_and_older_is_dropped() -> None:
    """L23: one pending PULL per fragment, the newest (t, attempt)."""
    session = training(1)
    assert session.pull(G1, PullRequest(0, 2, 1))
    assert session.pull(G1, PullRequest(0, 2, 2))
    assert not session.pull(G1, PullRequest(0, 2, 1))
    assert not session.pull(G1, PullRequest(0, 1, 9))
    (answer,) = boundary(session)[1]
    assert (answer.pull.step, answer.pull.attempt) == (2, 2)


def test_answers_go_in_order_of_arrival() -> None:
    session = training(3)
    for fragment in (2, 0, 1):
        session.pull(G1, PullRequest(fragment, 5 + fragment, 1))
    assert [a.pull.fragment for a in boundary(session)[1]] == [2, 0, 1]


def test_pull_of_a_committed_round_is_dropped() -> None:
    """L23: at arrival, and when a broadcast overtakes it."""
    session = training(1)
    session.pull(G1, PullRequest(0, 3, 1))
    session.broadcast(G1, 0, got(3))
    assert boundary(session)[1] == []
    assert boundary(session)[1] == []
    assert session.pending_pulls == 0
    assert not session.pull(G1, PullRequest(0, 3, 2))


def test_broadcasts_are_monotonic_and_idempotent() -> None:
    """L24."""
    session = training(1)
    assert session.broadcast(G1, 0, got(5)) is Verdict.ACCEPTED
    assert session.broadcast(G1, 0, got(4)) is Verdict.DROPPED
    assert session.broadcast(G1, 0, got(5)) is Verdict.REPLAYED
    assert [a.received.version for a in boundary(session)[0]] == [5]
    session.advance(1)
    assert session.broadcast(G1, 0, got(5)) is Verdict.REPLAYED
    assert session.take_broadcasts() == []
    assert (session.dropped, session.replayed) == (1, 2)


def test_equal_version_other_bytes_is_fatal() -> None:
    """L24, also over a redial; L25 for the final cache."""
    session = training(1)
    session.disconnected(G1)
    session.connected(G2)
    with pytest.raises(ProtocolError, match="broadcast 0 at version 0 twice"):
        session.broadcast(G2, 0, got(0, "other"))
    session.final_fragment(G2, 0, got(7))
    with pytest.raises(ProtocolError, match="final fragment 0 at version 7"):
        session.final_fragment(G2, 0, got(7, "other"))


def test_only_the_newest_waiting_broadcast_is_applied() -> None:
    """L20; the existing client blends both in turn (P5)."""
    session = training(1)
    session.broadcast(G1, 0, got(1))
    session.broadcast(G1, 0, got(2))
    assert [a.received.version for a in boundary(session)[0]] == [2]


def test_redial_drops_pulls_and_keeps_the_rest() -> None:
    """L12."""
    session = training(2)
    session.pull(G1, PullRequest(0, 4, 1))
    session.broadcast(G1, 1, got(3))
    session.disconnected(G1)
    assert session.pending_pulls == 0
    assert [a.fragment for a in boundary(session)[0]] == [1]
    session.connected(G2)
    # Late data of the old generation is ignored.
    assert session.broadcast(G1, 0, got(9)) is Verdict.IGNORED
    assert not session.pull(G1, PullRequest(0, 9, 1))
    session.pull(G2, PullRequest(0, 4, 2))
    (answer,) = boundary(session)[1]
    assert (answer.generation, answer.base_version, answer.c_steps) == (G2, 0, 2)


def test_rollback_is_noticed_once_per_connection() -> None:
    """L24: a lower version than an earlier connection brought; not a mere reordering."""
    session = training(2)
    session.broadcast(G1, 0, got(6))
    session.broadcast(G1, 0, got(5))
    assert session.warnings == []
    session.broadcast(G1, 1, got(6))
    session.disconnected(G1)
    session.connected(G2)
    assert session.broadcast(G2, 0, got(4)) is Verdict.DROPPED
    assert session.broadcast(G2, 1, got(4)) is Verdict.DROPPED
    assert len(session.warnings) == 1
    assert "rolled back" in session.warnings[0]
    assert session.rolled_back


def test_init_is_needed_until_every_fragment_came() -> None:
    """L14."""
    session: Session[str] = Session(2)
    session.connected(G1)
    session.broadcast(G1, 0, got(0))
    session.disconnected(G1)
    assert session.init_needed
    session.connected(G2)
    session.broadcast(G2, 1, got(0))
    assert not session.init_needed


# -- finalization ----------------------------------------------------------------------------


def finalizing() -> Session[str]:
    session = training(2)
    session.final_fragment(G1, 0, got(5, "a"))
    assert not session.final_manifest(G1, FinalManifest(5, (5, 4)))
    return session


def test_manifest_ends_training() -> None:
    """L30, L37: no broadcast applied, no push, pending PULLs gone."""
    session = training(2)
    session.pull(G1, PullRequest(0, 5, 1))
    session.broadcast(G1, 1, got(4))
    session.final_manifest(G1, FinalManifest(5, (5, 4)))
    assert boundary(session) == ([], [])
    assert not session.pull(G1, PullRequest(1, 9, 1))
    assert session.broadcast(G1, 0, got(9)) is Verdict.IGNORED


def test_cut_needs_exactly_the_manifest_versions() -> None:
    """L30; a BCAST of that version does not count (L25)."""
    session = finalizing()
    assert session.missing() == [(1, 4, None)]
    session.final_fragment(G1, 1, got(3))
    assert session.missing() == [(1, 4, 3)]
    session.final_fragment(G1, 1, got(4, "b"))
    assert session.missing() == []
    assert session.cut() == ["a@5", "b@4"]


def test_ack_is_pinned_to_the_generation_of_the_manifest() -> None:
    """L32: the group closes before the ACK; the next equal manifest triggers it."""
    session = finalizing()
    session.final_fragment(G1, 1, got(4, "b"))
    session.disconnected(G1)
    assert session.applied_cut() is None
    session.connected(G2)
    assert session.final_fragment(G2, 0, got(5, "a")) is Verdict.REPLAYED
    assert session.final_manifest(G2, FinalManifest(5, (5, 4)))
    session.ack_begun(G2)
    session.disconnected(G2, acknowledged=True)
    session.connected(G3)
    assert session.final_manifest(G3, FinalManifest(5, (5, 4)))
    session.shutdown(G3)
    assert session.mode is Mode.ENDED


def test_an_ack_that_was_not_written_is_owed_again() -> None:
    session = finalizing()
    session.final_fragment(G1, 1, got(4, "b"))
    assert session.applied_cut() == G1
    session.ack_begun(G1)
    session.disconnected(G1, acknowledged=False)
    assert session.mode is Mode.FINALIZING


def test_another_manifest_is_fatal() -> None:
    """L32."""
    session = finalizing()
    with pytest.raises(ProtocolError, match="different manifest"):
        session.final_manifest(G1, FinalManifest(5, (5, 3)))


def test_shutdown_before_the_ack_is_fatal() -> None:
    """L33."""
    for session in (training(), finalizing()):
        with pytest.raises(ProtocolError, match="SHUTDOWN"):
            session.shutdown(G1)


# -- budget ----------------------------------------------------------------------------------


def test_budget_run_starts_afresh_on_each_later_connection() -> None:
    """L41, L42."""
    session: Session[str] = Session(2, budget=1)
    session.connected(G1)
    session.broadcast(G1, 0, got(10))
    boundary(session, 64)
    assert session.report_budget() == G1
    assert session.broadcast(G1, 1, got(10)) is Verdict.IGNORED
    assert not session.pull(G1, PullRequest(0, 11, 1))
    session.disconnected(G1)
    session.connected(G2)
    # The resumed syncer may be older than anything seen before, and differ at equal versions.
    assert session.broadcast(G2, 0, got(3, "r")) is Verdict.ACCEPTED
    assert session.take_answers() == []
    session.pull(G2, PullRequest(0, 4, 1))
    (answer,) = session.take_answers()
    assert (answer.base_version, answer.anchor) == (3, "r@3")
    assert (answer.local_step, answer.c_steps, answer.c_tokens) == (1, 1, 64)
    # A repeated PULL is answered again; a newer base is remembered and nothing is blended.
    session.pull(G2, PullRequest(0, 4, 2))
    session.broadcast(G2, 0, got(5, "s"))
    session.pull(G2, PullRequest(0, 6, 1))
    assert [(a.pull.step, a.base_version) for a in session.take_answers()] == [(6, 5)]
    assert session.take_broadcasts() == []
    session.disconnected(G2)
    session.connected(G3)
    session.pull(G3, PullRequest(0, 6, 1))
    assert session.take_answers() == []


def test_budget_is_reported_once() -> None:
    """L40."""
    session: Session[str] = Session(1, budget=1)
    session.connected(G1)
    assert session.report_budget() == G1
    assert session.report_budget() is None


# -- durable state -----------------------------------------------------------------------------


def resumed(saved_version: int = 7) -> Session[str]:
    session: Session[str] = Session(1)
    session.resume(20, 200, {0: Anchor(saved_version, b"x", "saved", 15, 150)})
    session.connected(G1)
    return session


def test_equal_first_broadcast_continues_as_if_uninterrupted() -> None:
    """L52."""
    session = resumed()
    session.pull(G1, PullRequest(0, 8, 1))
    assert session.take_answers() == []
    session.broadcast(G1, 0, got(7))
    (due,), (answer,) = boundary(session)
    assert not due.blend
    assert (answer.c_steps, answer.c_tokens, answer.local_step) == (6, 60, 21)
    assert session.warnings == []


@pytest.mark.parametrize(("received", "warned"), [(got(9), 0), (got(5), 1), (got(7, "y"), 1)])
def test_other_first_broadcast_is_applied_as_normal(received, warned) -> None:
    """L52."""
    session = resumed()
    session.broadcast(G1, 0, received)
    (due,), _ = boundary(session)
    assert due.blend
    assert len(session.warnings) == warned
    session.pull(G1, PullRequest(0, 30, 1))
    (answer,) = boundary(session)[1]
    assert answer.c_steps == 1


def test_unconfirmed_anchor_is_saved_again() -> None:
    """L51: a save before the first broadcast loses nothing."""
    session = resumed()
    assert session.anchors == (Anchor(7, b"x", "saved", 15, 150),)


# -- the machine -------------------------------------------------------------------------------


class Run(RuleBasedStateMachine):
    """A syncer that sends what it likes in the order it likes, over any number of connections.

    The model tracks what L24 says of every broadcast; values are the (fragment, version) pair.
    """

    FRAGMENTS = 3

    @initialize()
    def begin(self) -> None:
        self.session: Session[tuple[int, int]] = Session(self.FRAGMENTS)
        self.generation = 0
        self.highest: dict[int, int] = {}
        self.applied: dict[int, int] = {}
        self.at_apply: dict[int, tuple[int, int]] = {}
        self.steps = self.units = 0

    def receive(self, fragment: int, version: int) -> Received[tuple[int, int]]:
        return Received(version, b"%d/%d" % (fragment, version), (fragment, version))

    @rule()
    def redial(self) -> None:
        self.session.disconnected(self.generation)
        assert self.session.pending_pulls == 0
        self.generation += 1
        self.session.connected(self.generation)

    @rule(fragment=st.integers(0, 2), version=st.integers(0, 30))
    def broadcast(self, fragment: int, version: int) -> None:
        if self.session.generation is None:
            return
        verdict = self.session.broadcast(self.generation, fragment, self.receive(fragment, version))
        highest = self.highest.get(fragment, -1)
        expected = (
            Verdict.ACCEPTED
            if version > highest
            else Verdict.REPLAYED
            if version == highest
            else Verdict.DROPPED
        )
        assert verdict is expected
        self.highest[fragment] = max(highest, version)

    @rule(fragment=st.integers(0, 2), data=st.data())
    def conflict(self, fragment: int, data: st.DataObject) -> None:
        if self.session.generation is None or fragment not in self.highest:
            return
        forged = Received(self.highest[fragment], b"forged", (9, 9))
        with pytest.raises(ProtocolError):
            self.session.broadcast(self.generation, fragment, forged)

    @rule(fragment=st.integers(0, 2), step=st.integers(1, 31), attempt=st.integers(1, 3))
    def pull(self, fragment: int, step: int, attempt: int) -> None:
        if self.session.generation is not None:
            self.session.pull(self.generation, PullRequest(fragment, step, attempt))

    @rule(tokens=st.integers(0, 50))
    def train(self, tokens: int) -> None:
        self.session.advance(tokens)
        self.steps += 1
        self.units += tokens
        for apply in self.session.take_broadcasts():
            assert apply.blend
            assert apply.received.values == (apply.fragment, apply.received.version)
            assert apply.received.version == self.highest[apply.fragment]
            assert apply.received.version > self.applied.get(apply.fragment, -1)
            self.session.applied(apply, apply.received.values)
            self.applied[apply.fragment] = apply.received.version
            self.at_apply[apply.fragment] = (self.steps, self.units)
        answers = self.session.take_answers()
        assert len({a.pull.fragment for a in answers}) == len(answers)
        for answer in answers:
            fragment = answer.pull.fragment
            # The base is the anchor, to the byte; never a push without progress.
            assert answer.anchor == (fragment, self.applied[fragment])
            assert answer.base_version == self.applied[fragment]
            assert answer.pull.step > answer.base_version
            steps, units = self.at_apply[fragment]
            assert answer.c_steps == self.steps - steps >= 1
            assert answer.c_tokens == self.units - units
            assert answer.generation == self.generation

    @invariant()
    def anchors_are_what_was_applied(self) -> None:
        for fragment, anchor in enumerate(self.session.anchors):
            assert (anchor and anchor.version) == self.applied.get(fragment)

    @invariant()
    def at_most_one_pull_per_fragment(self) -> None:
        assert self.session.pending_pulls <= self.FRAGMENTS


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
