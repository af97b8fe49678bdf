"""The network thread of a learner: dialling, redialling, and everything that leaves (L10-L16).

The training thread never waits for the network here: it hands over what it wants sent and goes on.
The model is never touched on this side.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch import Tensor

from learner.config import Address
from learner.errors import ConnectTimeout, LearnerError
from learner.events import LinkDown, LinkUp
from learner.feedback import Feedback
from learner.link import Link, transport_error
from learner.outgoing import Outgoing, Push
from learner.session import Mode
from learner.shared import Shared
from wire.dial import dial
from wire.errors import ProtocolError
from wire.group import Group, SendCounters, Timeouts
from wire.loop import new_event_loop
from wire.memory import SlabPool
from wire.messages import Hello, InitParams

log = logging.getLogger(__name__)

FIRST_DIAL_S = 30.0
REDIAL_S = 20.0
FIRST_PAUSE_S = 2.0
MAX_BACKOFF_S = 30.0
FAREWELL_S = 30.0
"""Seconds of refused redials after which an acknowledged learner goes home (L34)."""
BOUNDARY_HEARTBEAT_S = 1.0
_JOIN_S = 10.0
_JITTER = random.SystemRandom()
"""Not the process's own generator: its state belongs to the training (L51)."""
_LAST_TRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Transport:
    """How the sockets are protected (security.md); all None is plain TCP."""

    ssl: ssl.SSLContext | None = None
    server_name: str | None = None
    seal: Callable[[bytes], bytes] | None = None


class NetworkClient:
    """Owns the network thread. Methods are for the training thread unless said otherwise."""

    def __init__(
        self,
        address: Address,
        hello: Hello,
        shared: Shared,
        feedback: Feedback,
        *,
        blame: Callable[[int, Tensor], str],
        connect_timeout_s: float,
        transport: Transport | None = None,
        pool: SlabPool | None = None,
    ) -> None:
        """
        Args:
            address: the syncer.
            hello: ours; the generation is drawn anew before each dial.
            shared: session, lock and reports.
            feedback: encoder of deltas.
            blame: names the tensor that makes a delta unsendable.
            connect_timeout_s: bound of the first connection.
            transport: TLS and the seal of HELLO.
            pool: memory for what arrives.
        """
        self._address = address
        self._hello = hello
        self._shared = shared
        self._connect_timeout_s = connect_timeout_s
        self._transport = transport or Transport()
        self._pool = pool
        self._counters = SendCounters()
        self._link: Link | None = None
        self._life: asyncio.Task[None] | None = None
        self._loop = new_event_loop()
        self._executor = ThreadPoolExecutor(2, "learner-codec")
        self._outgoing = Outgoing(
            hello.learner_id,
            shared,
            feedback,
            self._executor,
            blame=blame,
            group_of=self._group,
        )
        self._thread = threading.Thread(target=self._run, name="learner-network", daemon=True)

    # -- called by the training thread --------------------------------------------------------

    def start(self) -> None:
        """Start dialling."""
        self._thread.start()

    def push(self, push: Push) -> None:
        """Encode and send one delta; a newer one for the fragment replaces it (W49)."""
        self._post(self._outgoing.push, push)

    def acknowledge(self, generation: int) -> None:
        """The cut is applied: send FINAL_ACK on that generation if it still lives (L32)."""
        self._post(self._acknowledge, generation)

    def report_budget(self, generation: int, steps: int) -> None:
        """Send BUDGET_DONE, once (L40)."""
        self._post(self._outgoing.report_budget, generation, steps)

    def boundary(self) -> None:
        """An optimizer step is done: heartbeat when the last one is old enough (W42)."""
        link = self._link
        if link is not None and self._loop.time() - link.last_heartbeat >= BOUNDARY_HEARTBEAT_S:
            self._post(link.heartbeat)

    def wake(self) -> None:
        """Wake a waiting training thread; safe in a signal handler."""
        self._post(self._shared.advance)

    def close(self) -> None:
        """Close the group and end the thread; what is unsent is dropped."""
        if self._thread.ident is None and not self._loop.is_closed():
            self._loop.close()
            self._executor.shutdown()
        elif self._thread.is_alive():
            self._post(self._cancel)
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                log.warning("the network thread did not end within %d s", _JOIN_S)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop has ended: a fatal error or the end of the run, reported elsewhere.
            log.debug("the network thread has ended, %s is dropped", callback)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _main(self) -> None:
        self._life = asyncio.create_task(self._live())
        try:
            await self._life
        except asyncio.CancelledError:
            log.debug("the network thread was asked to end")
        except LearnerError as error:
            self._shared.fail(error)
        except Exception as error:
            log.exception("the network thread failed")
            self._shared.fail(LearnerError(f"the network thread failed: {error!r}"))
        finally:
            await self._hang_up()

    def _cancel(self) -> None:
        if self._life is not None:
            self._life.cancel()

    async def _live(self) -> None:
        link, group = await self._connect()
        lost: float | None = None
        while True:
            self._adopt(link, group, None if lost is None else time.monotonic() - lost)
            beat = asyncio.create_task(link.beat())
            try:
                await link.closed.wait()
            finally:
                beat.cancel()
            self._link = None
            if self._part(link):
                return
            lost = time.monotonic()
            redialled = await self._redial(lost)
            if redialled is None:
                return
            link, group = redialled

    async def _hang_up(self) -> None:
        if self._link is not None and self._link.group is not None:
            group = self._link.group
            with self._shared.gate:
                ended = self._shared.session.mode is Mode.ENDED
            if ended:
                await group.finish()
            group.close()
            await self._link.stop()
        await self._outgoing.stop()

    def _adopt(self, link: Link, group: Group, outage_s: float | None) -> None:
        shared = self._shared
        with shared.gate:
            # With its event: a boundary that sees the connection reports it.
            shared.session.connected(link.generation)
            shared.advance(LinkUp(link.generation, outage_s))
            init = list(shared.init)
        self._link = link
        for fragment, tensor in enumerate(init):
            group.send_bulk(("init", fragment), InitParams(fragment, tensor))
        if outage_s is None:
            log.info("connected to the syncer at %s", self._address)
        else:
            log.info("connection to the syncer regained after %.1f s", outage_s)
        link.open(group)

    def _part(self, link: Link) -> bool:
        """The group is gone; whether the thread's work is over too."""
        shared = self._shared
        with shared.gate:
            shared.session.disconnected(link.generation, acknowledged=shared.acknowledged)
            shared.advance(LinkDown(link.reason))
            over = shared.fatal is not None or shared.session.mode is Mode.ENDED
        self._outgoing.drop_pushes()
        if not over:
            log.warning(
                "connection to the syncer lost (%s); training goes on, redialling", link.reason
            )
        return over

    # -- dialling -----------------------------------------------------------------------------

    async def _connect(self) -> tuple[Link, Group]:
        """The first connection: tries every 2 s, up to the connect timeout (L11)."""
        deadline = self._loop.time() + self._connect_timeout_s
        waiting = False
        while True:
            left = deadline - self._loop.time()
            try:
                return await self._dial(min(FIRST_DIAL_S, left))
            except OSError as error:
                problem = error
            if not waiting:
                log.info(
                    "waiting for the syncer at %s (%s); trying again every %d s, for up to %g s",
                    self._address,
                    _reason(problem),
                    FIRST_PAUSE_S,
                    self._connect_timeout_s,
                )
                waiting = True
            left = deadline - self._loop.time()
            if left <= FIRST_PAUSE_S:
                await asyncio.sleep(max(0.0, left))
                raise ConnectTimeout(
                    f"no syncer at {self._address} within {self._connect_timeout_s:g} s "
                    f"({_reason(problem)}); is the address right, and does yeto-syncer run there?"
                )
            await asyncio.sleep(FIRST_PAUSE_S)

    async def _redial(self, lost: float) -> tuple[Link, Group] | None:
        """A new group after an outage, or None when an acknowledged learner may go (L11, L34)."""
        with self._shared.gate:
            acknowledged = self._shared.acknowledged
        for wait in backoff(_JITTER.uniform):
            pause, limit = wait, REDIAL_S
            if acknowledged:
                left = FAREWELL_S - (time.monotonic() - lost)
                pause = min(wait, max(0.0, left))
                limit = min(REDIAL_S, max(_LAST_TRY_S, left - pause))
            await asyncio.sleep(pause)
            try:
                link, group = await self._dial(limit)
            except OSError as error:
                log.debug("redial failed: %s", _reason(error))
            else:
                with self._shared.gate:
                    self._shared.counters.redials += 1
                return link, group
            if acknowledged and time.monotonic() - lost >= FAREWELL_S:
                break
        self._leave_unconfirmed()
        return None

    def _leave_unconfirmed(self) -> None:
        log.warning(
            "the final cut is applied and acknowledged, but the syncer has not answered for %d s; "
            "leaving without its SHUTDOWN",
            FAREWELL_S,
        )
        with self._shared.gate:
            self._shared.unconfirmed = True
            self._shared.session.mode = Mode.ENDED
        self._shared.advance()

    async def _dial(self, limit: float) -> tuple[Link, Group]:
        """One try. OSError means: try again; LearnerError: never."""
        generation = self._hello.generation
        while generation in (0, self._hello.generation):
            generation = secrets.randbits(64)
        self._hello = replace(self._hello, generation=generation)
        link = Link(generation, self._shared, self._executor, self._outgoing.acknowledge)
        try:
            group = await dial(
                self._address.host,
                self._address.port,
                self._hello,
                sink=link,
                executor=self._executor,
                counters=self._counters,
                timeouts=Timeouts(dial=max(_LAST_TRY_S, limit)),
                ssl=self._transport.ssl,
                server_name=self._transport.server_name,
                seal=self._transport.seal,
                pool=self._pool,
            )
        except ProtocolError as problem:
            raise link.early_error() or link.fault(problem) from problem
        except OSError as error:
            fatal = link.early_error() or transport_error(error)
            if fatal is not None:
                raise fatal from error
            raise
        return link, group

    def _group(self, generation: int) -> Group | None:
        """The open group of a generation."""
        link = self._link
        if link is None or link.generation != generation or link.group is None:
            return None
        return None if link.group.closed else link.group

    def _acknowledge(self, generation: int) -> None:
        group = self._group(generation)
        if group is not None:
            self._outgoing.acknowledge(group)


def backoff(uniform: Callable[[float, float], float]) -> Iterator[float]:
    """Seconds to sleep before each redial of one outage: 1, 2, 4, … 30, each x 0.8 to 1.2 (L11)."""
    delay = 1.0
    while True:
        yield delay * uniform(0.8, 1.2)
        delay = min(MAX_BACKOFF_S, 2 * delay)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
