"""A syncer that says exactly what a test tells it to, over the real wire, on a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from wire.accept import Acceptor, Newcomer
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.group import Group, Timeouts
from wire.loop import new_event_loop
from wire.messages import (
    Broadcast,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    Hello,
    Message,
    PullRequest,
    Shutdown,
    decode_hello,
)
from wire.tensors import encode

M = TypeVar("M")
PATIENCE_S = 10.0
LEARNERS = 8


class ScriptedSyncer:
    """Accepts every HELLO (or refuses it), records what arrives, sends what it is told."""

    def __init__(self, port: int = 0) -> None:
        self.hellos: queue.Queue[Hello] = queue.Queue()
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.closed: queue.Queue[str] = queue.Queue()
        self.heartbeats: list[Heartbeat] = []
        self.pushes: list[Any] = []
        self.refusal: ProtocolError | None = None
        self.group: Group | None = None
        self._hello: Hello | None = None
        self._loop = new_event_loop()
        self._executor = ThreadPoolExecutor(1)
        self._ready: queue.Queue[int] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()
        self.port = self._ready.get(timeout=PATIENCE_S)

    def _run(self, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(port))
        self._loop.close()

    async def _serve(self, port: int) -> None:
        self._stop = asyncio.Event()
        acceptor = Acceptor(
            self,
            learners=LEARNERS,
            executor=self._executor,
            timeouts=Timeouts(linger=0.2),
        )
        _, bound = await acceptor.listen("127.0.0.1", port)
        self._ready.put(bound)
        await self._stop.wait()
        acceptor.close()
        for group in acceptor.groups:
            group.close()
            await group.wait_closed()

    # -- sinks ------------------------------------------------------------------------------

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        if self.refusal is not None:
            newcomer.refuse(self.refusal)
            return
        self._hello = decode_hello(payload, LEARNERS)
        self.group = newcomer.adopt(self._hello, self)
        self.hellos.put(self._hello)

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        if isinstance(message, Heartbeat):
            self.heartbeats.append(message)
        else:
            self.inbox.put(message)

    def on_closed(self, group: Group, reason: str) -> None:
        self.closed.put(reason)

    def on_bad_budget(self, group: Group) -> None:
        raise AssertionError("BUDGET_DONE of a wrong length")

    # -- the script -------------------------------------------------------------------------

    def accepted(self) -> Hello:
        """The next HELLO."""
        return self.hellos.get(timeout=PATIENCE_S)

    def expect(self, kind: type[M]) -> M:
        """The next message; it must be of this kind."""
        message = self.inbox.get(timeout=PATIENCE_S)
        assert isinstance(message, kind), message
        return message

    def quiet(self) -> bool:
        return self.inbox.empty()

    def broadcast(self, fragment: int, version: int, values: Tensor) -> None:
        dtype = self._session_dtype().bulk
        self.bulk(Broadcast(fragment, version, bytes(encode(values, dtype))))

    def pull(self, fragment: int, step: int, attempt: int = 1) -> None:
        self.control(PullRequest(fragment, step, attempt))

    def cut(self, step: int, versions: Sequence[int], values: Sequence[Tensor]) -> None:
        """The final fragments, then the manifest."""
        for fragment, (version, tensor) in enumerate(zip(versions, values, strict=True)):
            self.bulk(FinalFragment(fragment, version, bytes(encode(tensor, DType.F32))))
        self.control(FinalManifest(step, tuple(versions)))

    def shutdown(self) -> None:
        self.control(Shutdown())

    def control(self, message: Message) -> None:
        self.call(lambda group: group.send_control(message))

    def bulk(self, message: Any) -> None:
        self.call(lambda group: group.send_bulk(object(), message))

    def drop(self) -> None:
        """Close the group's sockets without a word."""
        self.call(lambda group: group.close())
        self.closed.get(timeout=PATIENCE_S)

    def play(self, script: Callable[[], object]) -> threading.Thread:
        """Run a script on a thread; when it fails the learner is told, and the test ends too."""

        def run() -> None:
            try:
                script()
            except BaseException as error:
                self.refusal = ProtocolError(ErrorCode.STOPPED, f"the script failed: {error!r}")
                self.error(self.refusal.sentence)
                raise

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def error(self, text: str) -> None:
        self.call(lambda group: group.close(ProtocolError(ErrorCode.STOPPED, text)))

    def call(self, action: Callable[[Group], object]) -> None:
        """Run something on the loop's thread and wait for it."""
        done: queue.Queue[BaseException | None] = queue.Queue()

        def run() -> None:
            try:
                assert self.group is not None
                action(self.group)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        self._loop.call_soon_threadsafe(run)
        error = done.get(timeout=PATIENCE_S)
        if error is not None:
            raise error

    def stop(self) -> None:
        """Close everything and free the port."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        self._executor.shutdown()

    def _session_dtype(self) -> DType:
        assert self._hello is not None
        return self._hello.dtype


@contextmanager
def scripted_syncer(port: int = 0) -> Iterator[ScriptedSyncer]:
    """A scripted syncer for the length of a block."""
    syncer = ScriptedSyncer(port)
    try:
        yield syncer
    finally:
        syncer.stop()


def values(numel: int, seed: int) -> Tensor:
    """f32 values that bf16 holds exactly."""
    raw = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return raw.bfloat16().float()
