"""A repeated generation: a replay where strangers cannot enter, else a redial (S4, W12.14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncer import commands as c
from syncer import events as e
from syncer.config import CoordinatorConfig
from syncer.coordinator import Coordinator
from tests.syncer.shell.fakes import hello
from wire.dtypes import DType
from wire.messages import Hello
from wire.replay import ReplayGuard


class Gate:
    """A core that is only asked who may enter."""

    def __init__(self, *, closed: bool) -> None:
        config = CoordinatorConfig(profile=b"p" * 32)
        self.core = Coordinator(config, None, ReplayGuard() if closed else None)
        self._token = 0

    def enter(self, wanted: Hello) -> str:
        """The code of the refusal, or the word in."""
        self._token += 1
        for command in self.core.handle(e.HelloReceived(self._token, wanted), 1.0):
            if isinstance(command, c.RefuseHello):
                return str(command.error.code)
            if isinstance(command, c.AcceptHello):
                return "in"
        raise AssertionError("no answer")

    def leave(self, wanted: Hello) -> None:
        self.core.handle(e.GroupClosed(e.Member(wanted.learner_id, wanted.generation)), 2.0)


@pytest.mark.parametrize("closed", [True, False])
def test_a_generation_that_is_gone(closed: bool) -> None:
    gate = Gate(closed=closed)
    assert gate.enter(hello(0, 1)) == "in"
    assert gate.enter(hello(1, 7)) == "in"
    assert gate.enter(hello(1, 7)) == "duplicate-generation"
    gate.leave(hello(1, 7))
    assert gate.enter(hello(1, 7)) == ("duplicate-generation" if closed else "in")
    assert gate.enter(hello(2, 7)) == "in"
    assert gate.enter(hello(1, 8)) == "in"


def test_it_is_the_last_step_and_a_refused_hello_is_not_remembered() -> None:
    """W12: the first failing step names the code."""
    gate = Gate(closed=True)
    assert gate.enter(hello(0, 1)) == "in"
    assert gate.enter(hello(1, 7, DType.BF16)) == "session-mismatch"
    assert gate.enter(hello(1, 7)) == "in"
    gate.leave(hello(1, 7))
    assert gate.enter(hello(1, 7, DType.BF16)) == "session-mismatch"
    assert gate.enter(replace(hello(1, 7), profile=b"q" * 32)) == "profile-mismatch"
    assert gate.enter(hello(1, 7)) == "duplicate-generation"


def test_a_replay_does_not_supersede() -> None:
    """C19: the current generation stays the current one."""
    gate = Gate(closed=True)
    for generation in (1, 2):
        gate.enter(hello(0, generation))
    gate.leave(hello(0, 1))
    assert gate.enter(hello(0, 1)) == "duplicate-generation"
    assert gate.core.members.current() == (e.Member(0, 2),)
