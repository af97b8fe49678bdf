"""A scripted core, and groups that only note what they are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from typing import Any

from syncer.actor import Actor
from syncer.commands import AcceptHello, Command
from syncer.events import Event, HelloReceived, Member
from syncer.services import Services
from syncer.workers import Workers
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.messages import BulkMessage, Hello, Message

LAYOUT = NumericLayout(tuple(numeric_fragment(MergeMode.AVG, [4]) for _ in range(3)))


class FakeCore:
    """Answers each event by what `answers` says; HELLOs are accepted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.answers: dict[type[Any], Callable[[Any], list[Command]]] = {
            HelloReceived: lambda event: [
                AcceptHello(event.token, Member(event.hello.learner_id, event.hello.generation))
            ]
        }
        self.deadline: float | None = None
        self.nested = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        assert self.nested == 0, "handle was called from inside handle"
        self.nested += 1
        try:
            self.events.append(event)
            answer = self.answers.get(type(event))
            return [] if answer is None else answer(event)
        finally:
            self.nested -= 1

    def next_deadline(self) -> float | None:
        return self.deadline

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class FakeGroup:
    """Notes sends; `unsent` bulk messages can still be withdrawn."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.closed = False
        self.fault: ProtocolError | None = None
        self.sent: list[Message] = []
        self.keys: list[Hashable] = []
        self.withdrawn: list[Hashable] = []
        self.closed_with: ProtocolError | None = None

    def send_control(self, message: Message, key: Hashable | None = None) -> None:
        self.sent.append(message)
        self.keys.append(key)

    def send_bulk(self, key: Hashable, message: BulkMessage) -> None:
        self.sent.append(message)
        self.keys.append(key)

    def withdraw_control(self, key: Hashable) -> bool:
        self.withdrawn.append(key)
        return True

    def withdraw_bulk(self, key: Hashable) -> bool:
        self.withdrawn.append(key)
        return True

    def close(self, error: ProtocolError | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self.closed_with = error
        self.sink.on_closed(self, "closed")


class FakeNewcomer:
    def __init__(self) -> None:
        self.peer = "192.0.2.1:5"
        self.gone = False
        self.refused: ProtocolError | None = None
        self.group: FakeGroup | None = None

    def adopt(self, hello: Hello, sink: Any) -> FakeGroup:
        self.group = FakeGroup(sink)
        return self.group

    def refuse(self, error: ProtocolError) -> None:
        self.refused = error


class FakeStore:
    """Blocks each save until `gate` is set; fails when `error` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def save(
        self,
        snapshot: Any,
        *,
        patch: bool,
        last: bool,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        assert self.gate.wait(5)
        if self.error is not None:
            raise self.error
        if before_publish is not None:
            before_publish()
        self.calls.append(("save", patch, last))

    def write_marker(self, step: int) -> None:
        self.calls.append(("marker", step))

    def remove_marker(self) -> None:
        self.calls.append(("unmark",))


def hello(learner_id: int = 0, generation: int = 1, dtype: DType = DType.F32) -> Hello:
    return Hello(
        learner_id=learner_id,
        generation=generation,
        dtype=dtype,
        layout=LAYOUT,
        fingerprint=b"f" * 32,
        contract=b"c" * 32,
        profile=None,
        num_streams=0,
    )


class Bench:
    """An actor around a fake core; use inside a running loop."""

    def __init__(self, tape: Any = None, svd: Any = None, drain: Any = None) -> None:
        self.core = FakeCore()
        self.store = FakeStore()
        self.workers = Workers()
        self.actor = Actor(
            self.core,
            Services(
                store=self.store,
                svd=svd,
                drain_svd=drain,
                write_final_state=lambda snapshot: self.store.calls.append(("final",)),
                tape=tape,
            ),
            self.workers,
            asyncio.get_running_loop(),
        )

    def join(self, learner_id: int = 0, generation: int = 1, dtype: DType = DType.F32) -> FakeGroup:
        newcomer = FakeNewcomer()
        self.actor.hello(newcomer, hello(learner_id, generation, dtype))
        assert newcomer.group is not None
        return newcomer.group

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  threads have no event to wait for
                await asyncio.sleep(0.001)
