"""The actor: one inbox, one deadline timer, and the hands that run the core's commands (C1).

    sockets -> links ---+                         +---> links -> sockets
    threads ------------+--> inbox -> core.handle +---> threads (merge, encode, disk, tape)
    timer, signals -----+                         +---> log, finish

The core decides, this file does. Nothing here waits: work that takes time goes to a thread and
comes back as an event with its ticket.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from syncer import commands as c
from syncer import events as e
from syncer.broadcasts import Broadcasts
from syncer.jobs import Jobs
from syncer.links import Link
from syncer.logs import LEVELS, LOGGER, Progress, RateLimited
from syncer.recorder import Recorder
from syncer.services import Services
from syncer.workers import Workers, call_in
from wire.errors import ProtocolError
from wire.messages import Hello, PullRequest

if TYPE_CHECKING:
    from wire.accept import Newcomer

LONGEST_TIMER = 3600.0
"""Seconds; a deadline further away is looked at again then."""
SHORTEST_TIMER = 0.001
"""Seconds; the loop's own resolution."""


class Core(Protocol):
    """What the actor needs of the coordinator."""

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        """Take one event, return what to do, in order."""

    def next_deadline(self) -> float | None:
        """When the core wants a `Tick`."""


class Actor:
    """Owns the core and everything that reaches it. All methods: loop thread only.

    Attributes:
        finished: holds the core's `Finish` once the run is over.
        links: the connected groups.
        progress: what was committed last.
    """

    def __init__(
        self,
        core: Core,
        services: Services,
        workers: Workers,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.finished: asyncio.Future[c.Finish] = loop.create_future()
        self.log = RateLimited()
        self.links: dict[e.Member, Link] = {}
        self._core = core
        self._workers = workers
        self._loop = loop
        self._inbox: deque[e.Event] = deque()
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._arming = False
        self._newcomers: dict[int, tuple[Newcomer, Hello]] = {}
        self._token = 0
        self._session: Hello | None = None
        self.progress = Progress()
        self._broadcasts = Broadcasts(loop, workers.encode, self.fail)
        self._recorder: Recorder | None = None
        if services.tape is not None:
            self._recorder = Recorder(services.tape, loop, workers.tape, self.fail)
        self._jobs = Jobs(services, workers, loop, self.post, self._recorder)
        self._runners: dict[type[Any], Callable[[Any], None]] = {
            c.AcceptHello: self._accept_hello,
            c.RefuseHello: self._refuse_hello,
            c.SendPull: self._send_pull,
            c.DropPulls: self._drop_pulls,
            c.SendBroadcast: self._send_broadcast,
            c.SendCut: self._send_cut,
            c.SendShutdown: self._send_shutdown,
            c.CloseGroup: self._close_group,
            c.DecodeInit: self._decode_init,
            c.StartMerge: self._jobs.start_merge,
            c.SaveCheckpoint: self._jobs.save_checkpoint,
            c.WriteFinalState: self._jobs.write_final_state,
            c.WriteMarker: self._jobs.write_marker,
            c.RemoveMarker: self._jobs.remove_marker,
            c.DrainPool: self._jobs.drain_pool,
            c.WriteTape: self._write_tape,
            c.Log: self._write_log,
            c.Finish: self._finish,
        }

    # -- the inbox -------------------------------------------------------------------------------

    def post(self, event: e.Event) -> None:
        """Hand an event to the core, after those that came before it."""
        if self.finished.done():
            return
        self._inbox.append(event)
        if not self._running:
            self._drain()

    def hello(self, newcomer: Newcomer, hello: Hello) -> None:
        """A HELLO passed steps 1 to 9 of W12; the core decides about the rest."""
        self._token += 1
        self._newcomers[self._token] = (newcomer, hello)
        self.post(e.HelloReceived(self._token, hello))

    def record(self, fields: Mapping[str, Any]) -> None:
        """Append one record to the tape, when there is one."""
        if self._recorder is not None:
            self._recorder.write(fields)

    async def settle(self) -> None:
        """After the end: wait for a running disk write, then close the tape durably.

        Raises:
            TapeFailed: the tape's last records can't be written.
        """
        await self._loop.run_in_executor(self._workers.disk, _nothing)
        if self._recorder is not None:
            await self._loop.run_in_executor(self._workers.disk, self._recorder.close)

    def fail(self, reason: str) -> None:
        """End the run with exit 1 (C84)."""
        self.post(e.Failure(reason))

    def fail_from_thread(self, reason: str) -> None:
        """`fail`, from any thread; nothing once the loop is closed."""
        call_in(self._loop, self.fail, reason)

    def _drain(self) -> None:
        self._running = True
        try:
            while self._inbox and not self.finished.done():
                event = self._inbox.popleft()
                for command in self._core.handle(event, self._loop.time()):
                    self._runners[type(command)](command)
        except Exception as error:  # a fault of ours: say so in full and end the run (W37)
            LOGGER.exception("internal error")
            self._finish(c.Finish(1, f"internal error: {error!r}"))
        finally:
            self._running = False
        if not self._arming:
            self._arming = True
            self._loop.call_soon(self._arm)

    # -- the timer -------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Make sure that a timer fires at the core's next deadline, or earlier."""
        self._arming = False
        if self.finished.done():
            return
        deadline = self._core.next_deadline()
        if deadline is None:
            return
        now = self._loop.time()
        at = min(max(deadline, now + SHORTEST_TIMER), now + LONGEST_TIMER)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._fired)

    def _fired(self) -> None:
        self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= self._loop.time():
            self.post(e.Tick())
        else:
            self._arm()

    # -- sockets ---------------------------------------------------------------------------------

    def _accept_hello(self, command: c.AcceptHello) -> None:
        newcomer, hello = self._newcomers.pop(command.token)
        if self._session is not None and self._session.layout == hello.layout:
            # Else every learner would keep a copy, which is large with millions of fragments.
            hello = replace(hello, layout=self._session.layout)
        member = command.member
        link = Link(member, self._left, self.post, self.log)
        if self._session is None:
            self._jobs.warm_up(hello)
        self._session = hello
        self.links[member] = link
        link.open(newcomer.adopt(hello, link))
        self.log.log(
            logging.DEBUG,
            "connected",
            f"learner {member.learner_id} speaks {hello.dtype.label} from {newcomer.peer}, "
            f"{len(hello.layout)} fragments, {hello.num_streams} data sockets",
            learner=member.learner_id,
            generation=member.generation,
            peer=newcomer.peer,
        )

    def _refuse_hello(self, command: c.RefuseHello) -> None:
        newcomer, _ = self._newcomers.pop(command.token)
        newcomer.refuse(command.error)

    def _left(self, member: e.Member) -> None:
        del self.links[member]
        self.post(e.GroupClosed(member))

    def refuse(self, newcomer: Newcomer, error: ProtocolError) -> None:
        """Answer a HELLO that failed before the core saw it; only its socket is closed (W13)."""
        self.log.log(
            logging.WARNING,
            "hello_refused",
            f"refused a client from {newcomer.peer}: {error.text}",
            peer=newcomer.peer,
            code=str(error.code),
        )
        newcomer.refuse(error)

    def _send_pull(self, command: c.SendPull) -> None:
        message = PullRequest(command.fragment, command.step, command.attempt)
        for link in self._open(command.members):
            link.pull(message)

    def _drop_pulls(self, command: c.DropPulls) -> None:
        for link in self._open(command.members):
            link.drop_pull(command.step, command.attempt)

    def _send_broadcast(self, command: c.SendBroadcast) -> None:
        self._broadcasts.send(
            self._open(command.members),
            command.fragment,
            command.version,
            command.params,
            self._accepted.dtype.bulk,
        )

    def _send_cut(self, command: c.SendCut) -> None:
        for link in self._open((command.member,)):
            self._broadcasts.send_cut(
                link, command.step, command.versions, command.params, self._cut_queued
            )

    def _cut_queued(self, link: Link) -> None:
        self.post(e.CutQueued(link.member))

    def _send_shutdown(self, command: c.SendShutdown) -> None:
        for link in self._open((command.member,)):
            link.shutdown()

    def _close_group(self, command: c.CloseGroup) -> None:
        for link in self._open((command.member,)):
            link.close(command.error)

    def _open(self, members: tuple[e.Member, ...]) -> list[Link]:
        """Links of the members that are still connected; the core hears of the others soon."""
        links = self.links
        return [links[member] for member in members if member in links]

    def _decode_init(self, command: c.DecodeInit) -> None:
        self._jobs.decode_init(command, self._accepted)

    @property
    def _accepted(self) -> Hello:
        """A HELLO of the session."""
        if self._session is None:
            raise RuntimeError("no HELLO was accepted yet")
        return self._session

    # -- words -----------------------------------------------------------------------------------

    def _write_tape(self, command: c.WriteTape) -> None:
        self.record(command.record)
        if "step" in command.record:
            self.progress.committed(command.record)

    def _write_log(self, command: c.Log) -> None:
        self.log.text(LEVELS[command.level], command.text)

    def _finish(self, command: c.Finish) -> None:
        if not self.finished.done():
            self.finished.set_result(command)
        if self._timer is not None:
            self._timer.cancel()


def _nothing() -> None:
    """Runs when everything before it in a pool has run."""
