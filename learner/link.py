"""One connection group as the learner sees it: what arrives, and the heartbeat.

Everything runs on the network thread's loop. Control messages act at once; fragments are digested
and decoded in a worker thread, one after the other, and the group stops reading meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor

from learner import hints
from learner.errors import LearnerError, ProtocolFault, SyncerRefused, TransportRefused
from learner.fragments import Received
from learner.session import Mode
from learner.shared import Shared
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.group import Group
from wire.inbound import MAX_WAITING
from wire.limits import Session as WireSession
from wire.messages import (
    Broadcast,
    ErrorMessage,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    Message,
    PullRequest,
    Shutdown,
)
from wire.tls_stream import TlsFailure

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Seconds between heartbeats of the network thread (W42)."""
_COPY_BELOW = 1 << 16
_HEAD = struct.Struct("<IQ")
_IN_TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}


class Link:
    """Sink of one dial. Messages that come before `open` is called wait in `early`.

    Attributes:
        generation: of the group.
        closed: set once the group is gone and everything it delivered has been handled.
    """

    def __init__(
        self,
        generation: int,
        shared: Shared,
        executor: Executor,
        acknowledge: Callable[[Group], None],
    ) -> None:
        self.generation = generation
        self.closed = asyncio.Event()
        self.reason = ""
        self.group: Group | None = None
        self.last_heartbeat = 0.0
        self._shared = shared
        self._executor = executor
        self._acknowledge = acknowledge
        self._opened = False
        self._heard = False
        self._early: list[Message] = []
        self._fragments: deque[Broadcast | FinalFragment] = deque()
        self._wake = asyncio.Event()
        self._gone = False
        self._worker: asyncio.Task[None] | None = None

    # -- the group's sink -------------------------------------------------------------------

    def on_message(self, group: Group, message: Message, arrived: float) -> None:
        """A checked message; see `wire.group.GroupSink`."""
        del arrived
        self.group = group
        self._heard = True
        for _ in range(_weight(message)):
            group.hold()
        if self._opened:
            self._take(group, message)
        else:
            self._early.append(message)

    def on_closed(self, group: Group, reason: str) -> None:
        """The group is gone; see `wire.group.GroupSink`."""
        self.reason = reason
        self._gone = True
        fatal: LearnerError | None = transport_error(group.cause)
        if group.fault is not None:
            fatal = self.fault(group.fault)
        if fatal is not None:
            self._shared.fail(fatal)
        if not self._opened:
            self.closed.set()
        self._wake.set()

    def on_bad_budget(self, group: Group) -> None:
        """Only a syncer reads BUDGET_DONE."""
        raise AssertionError("a learner never reads BUDGET_DONE")

    # -- the client -------------------------------------------------------------------------

    def early_error(self) -> LearnerError | None:
        """What makes a failed dial fatal: an ERROR that came meanwhile (L13)."""
        for message in self._early:
            if isinstance(message, ErrorMessage):
                return SyncerRefused(hints.refusal(message.text))
        return None

    def fault(self, problem: ProtocolError) -> ProtocolFault:
        """What to raise when the other side broke the protocol (L13, W40)."""
        return ProtocolFault(hints.fault(problem, heard=self._heard))

    def open(self, group: Group) -> None:
        """The dial succeeded and the session knows the generation: handle what came."""
        self.group = group
        self._opened = True
        self.closed.clear()
        self._worker = asyncio.create_task(self._decode_fragments())
        early, self._early = self._early, []
        for message in early:
            self._take(group, message)

    async def beat(self) -> None:
        """Send heartbeats until the group closes (W42)."""
        while not self.closed.is_set():
            try:
                await asyncio.wait_for(self.closed.wait(), HEARTBEAT_S)
            except TimeoutError:
                self.heartbeat()

    def heartbeat(self) -> None:
        """Send one heartbeat now."""
        if self.group is None or self.group.closed:
            return
        self.last_heartbeat = asyncio.get_running_loop().time()
        with self._shared.gate:
            local_step = self._shared.session.local_step
        self.group.send_control(Heartbeat(self.group.learner_id, local_step))

    async def stop(self) -> None:
        """End the decoding task; what it has not handled is dropped."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    # -- inbound ----------------------------------------------------------------------------

    def _take(self, group: Group, message: Message) -> None:
        session = self._shared.session
        try:
            match message:
                case Broadcast() | FinalFragment():
                    self._fragments.append(message)
                    self._wake.set()
                case PullRequest():
                    with self._shared.gate:
                        session.pull(self.generation, message)
                    self._shared.advance()
                case FinalManifest():
                    with self._shared.gate:
                        again = session.final_manifest(self.generation, message)
                    self._shared.advance()
                    if again:
                        self._acknowledge(group)
                case Shutdown():
                    with self._shared.gate:
                        session.shutdown(self.generation)
                    self._shared.advance()
                case ErrorMessage(text):
                    self._shared.fail(SyncerRefused(hints.refusal(text)))
                case _:
                    raise AssertionError(f"a learner cannot read {type(message).__name__}")
        except ProtocolError as error:
            self._shared.fail(ProtocolFault(error.sentence))

    async def _decode_fragments(self) -> None:
        while True:
            while self._fragments:
                # No name for it here: while this waits, its memory may take the next message.
                await self._decode_one(self._fragments.popleft())
            if self._gone:
                self.closed.set()
                return
            self._wake.clear()
            await self._wake.wait()

    async def _decode_one(self, message: Broadcast | FinalFragment) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._wanted(message):
                received = await loop.run_in_executor(self._executor, self._decode, message)
                self._deliver(message, received)
        except ProtocolError as error:
            self._shared.fail(ProtocolFault(error.sentence))
        if self.group is not None:
            for _ in range(_weight(message)):
                self.group.release()

    def _wanted(self, message: Broadcast | FinalFragment) -> bool:
        """Whether decoding is worth it: finalization ignores broadcasts (L37)."""
        if isinstance(message, FinalFragment):
            return True
        with self._shared.gate:
            return self._shared.session.mode in (Mode.TRAIN, Mode.FROZEN, Mode.REPORTED)

    def _decode(self, message: Broadcast | FinalFragment) -> Received[Tensor]:
        """Digest and values as they arrived; runs in a worker thread."""
        session = self._session()
        dtype = session.tensor_dtype(message)
        if dtype is None:
            raise AssertionError("fragments always have a dtype")
        digest = hashlib.sha256(_HEAD.pack(message.fragment, message.version))
        digest.update(message.tensor)
        view = memoryview(message.tensor)
        # A large fragment keeps its receive buffer, until it is an anchor or even as one.
        data = bytearray(view) if view.readonly or view.nbytes < _COPY_BELOW else view
        # The group has checked length and finite values (W11).
        return Received(
            message.version, digest.digest(), torch.frombuffer(data, dtype=_IN_TORCH[dtype])
        )

    def _session(self) -> WireSession:
        if self.group is None:
            raise AssertionError("a message came without its group")
        return self.group.session

    def _deliver(self, message: Broadcast | FinalFragment, received: Received[Tensor]) -> None:
        shared = self._shared
        with shared.gate:
            session = shared.session
            if isinstance(message, Broadcast):
                session.broadcast(self.generation, message.fragment, received)
            else:
                session.final_fragment(self.generation, message.fragment, received)
            if not session.init_needed:
                shared.init.clear()
            shared.counters.received_bytes += len(message.tensor)
            shared.counters.dropped_broadcasts = session.dropped
            shared.counters.replayed_broadcasts = session.replayed
            warnings, session.warnings = session.warnings, []
        for text in warnings:
            log.warning("%s", text)
        shared.advance()


def _weight(message: Message) -> int:
    """How many messages that wait one counts as.

    Nothing is read while a broadcast is digested: the next one would take a fragment more beside
    it. A final cut is kept whole anyway.
    """
    if isinstance(message, Broadcast):
        return MAX_WAITING
    return int(isinstance(message, FinalFragment))


def transport_error(cause: Exception | None) -> TransportRefused | None:
    """What makes an I/O error fatal: a TLS problem that a redial cannot mend (S13)."""
    if isinstance(cause, TlsFailure) and cause.problem.fatal:
        return TransportRefused(cause.problem.reason)
    return None
