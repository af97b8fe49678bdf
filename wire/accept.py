"""The syncer's door: sockets up to their first frame, and the groups they join (W7, W13, W17)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Protocol, cast

from wire.connection import FirstFrame
from wire.errors import ErrorCode, ProtocolError
from wire.frames import MessageType, Role
from wire.group import Group, GroupSink, Timeouts
from wire.limits import Session
from wire.memory import SlabPool
from wire.messages import DataHello, ErrorMessage, Hello, decode_data_hello, encode_frame
from wire.quota import Quota, Share
from wire.stream import Stream
from wire.tls import (
    CUT_OFF,
    PeerCertificate,
    TlsProblem,
    check_identity,
    check_same_peer,
    looks_like_tls,
)
from wire.tls_stream import TlsDoor, TlsEndpoint

BACKLOG = 1024
LARGE_HELLOS_BYTES = 128 * 1024 * 1024
"""What all HELLOs above `FREE_HELLO_BYTES` may hold together until they have been read."""

log = logging.getLogger(__name__)


class AcceptSink(Protocol):
    """Who judges HELLOs."""

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        """A whole HELLO payload, unread; answered by `adopt` or `refuse`, now or later."""


class Newcomer:
    """A socket that belongs to no group yet.

    Attributes:
        stream: the socket.
        gone: it is closed, or it has been refused; adopting it would make a dead group.
        certificate: what the client showed under TLS (S12).
    """

    def __init__(self, acceptor: Acceptor) -> None:
        self.gone = False
        self.certificate: PeerCertificate | None = None
        self._acceptor = acceptor
        self._frame = FirstFrame(gated=True)
        self._share: Share | None = None
        self._handed_over = False
        self.stream = Stream(self._frame, self, acceptor.timeouts.stall, acceptor.forget)
        self._abort: Callable[[], None] = self.stream.abort
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(acceptor.timeouts.handshake, self.drop)

    @property
    def peer(self) -> str:
        """Address and port of the client."""
        return self.stream.peer

    def adopt(self, hello: Hello, sink: GroupSink) -> Group:
        """The HELLO is accepted: the group exists from now on (W14)."""
        acceptor = self._acceptor
        self._leave()
        self.payload_read()
        group = Group(
            session=Session(Role.SYNCER, hello.layout, hello.dtype, hello.learner_id),
            generation=hello.generation,
            num_streams=hello.num_streams,
            sink=sink,
            executor=acceptor.executor,
            timeouts=acceptor.timeouts,
            pool=acceptor.pool,
            report_bad_budget=acceptor.report_bad_budget,
            certificate=self.certificate,
            on_gone=acceptor.groups.remove,
        )
        group.attach(0, self.stream)
        acceptor.groups.add(group)
        return group

    def join(self, group: Group, index: int) -> None:
        """Become data socket `index` (0-based) of a live group, or be refused (W17, S12)."""
        if self.gone:
            return
        try:
            check_same_peer(self.certificate, group.certificate)
            if not group.takes(index + 1):
                raise ProtocolError(
                    ErrorCode.STREAM_INDEX,
                    f"data socket {index} is taken or not below the {group.num_streams} declared",
                )
        except ProtocolError as error:
            self.refuse(error)
            return
        self._leave()
        group.attach(index + 1, self.stream)

    def refuse(self, error: ProtocolError) -> None:
        """ERROR on this socket, which is then closed; no group is touched (W13)."""
        if self.gone:
            return
        self._leave()
        self.payload_read()
        self.gone = True
        last = encode_frame(ErrorMessage(error.text))
        self.stream.linger(last, self._acceptor.timeouts.linger)

    def drop(self) -> None:
        """Close silently: an ERROR would be fatal to an honest learner (section 9)."""
        self._leave()
        if not self._handed_over:  # else the sink still holds the payload
            self.payload_read()
        self.gone = True
        self._abort()

    def payload_read(self) -> None:
        """The sink does not hold the HELLO payload any more: others may send theirs."""
        if self._share is not None:
            self._share.give_back()
            self._share = None

    def guard(self, endpoint: TlsEndpoint) -> None:
        """The socket is still shaking hands below `endpoint` (S13)."""
        self._abort = endpoint.abort

    # -- StreamOwner -------------------------------------------------------------------------

    def on_connected(self, stream: Stream) -> None:
        """See `StreamOwner`."""
        if self.gone:
            stream.abort()
            return
        self._abort = stream.abort
        certificate = stream.transport.get_extra_info("peer_certificate")
        if isinstance(certificate, PeerCertificate):
            self.certificate = certificate

    def on_bytes(self, stream: Stream) -> None:
        """The first frame is complete, or grows so large that it has to wait for its turn."""
        stream.pause_reading()
        if not self._frame.complete:
            self._share = self._acceptor.large.ask(self._frame.length, stream.resume_reading)
            return
        self._timer.cancel()
        kind, payload = self._frame.take()
        if kind is MessageType.HELLO:
            self._handed_over = True
            self._acceptor.sink.on_hello(self, payload)
            return
        try:
            hello = decode_data_hello(payload, self._acceptor.learners)
            check_identity(self.certificate, hello.learner_id)
        except ProtocolError as error:
            self.refuse(error)
        else:
            self._acceptor.groups.find(self, hello, self._acceptor.timeouts.handshake)

    def on_fault(self, stream: Stream, error: ProtocolError) -> None:
        """The first frame is none."""
        if looks_like_tls(self._frame.header):
            self._acceptor.hint_tls(self.peer)
        self.refuse(error)

    def on_drained(self, stream: Stream) -> None:
        """Nothing is written before the end."""

    def on_ended(self, stream: Stream, error: Exception | None) -> None:
        """EOF or an I/O error: closed silently."""
        self.drop()

    def _leave(self) -> None:
        self._timer.cancel()
        self._acceptor.pending.discard(self)


class GroupRegistry:
    """Live groups by (learner id, generation), and data sockets that wait for theirs (W17)."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Group] = {}
        self._waiting: dict[tuple[int, int], dict[Newcomer, tuple[int, asyncio.TimerHandle]]] = {}

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, learner_id: int, generation: int) -> Group | None:
        """The live group of exactly this id and generation."""
        return self._groups.get((learner_id, generation))

    def add(self, group: Group) -> None:
        """A group exists; data sockets that waited for it join."""
        if group.closed:
            return
        key = (group.learner_id, group.generation)
        self._groups[key] = group
        for newcomer, (index, timer) in self._waiting.pop(key, {}).items():
            timer.cancel()
            newcomer.join(group, index)

    def remove(self, group: Group) -> None:
        """A group is closing."""
        key = (group.learner_id, group.generation)
        if self._groups.get(key) is group:
            del self._groups[key]

    def find(self, newcomer: Newcomer, hello: DataHello, patience: float) -> None:
        """Join the socket to its group, waiting for it up to `patience` seconds."""
        key = (hello.learner_id, hello.generation)
        group = self._groups.get(key)
        if group is not None:
            newcomer.join(group, hello.stream_index)
            return
        timer = asyncio.get_running_loop().call_later(patience, self._give_up, key, newcomer)
        self._waiting.setdefault(key, {})[newcomer] = (hello.stream_index, timer)

    def _give_up(self, key: tuple[int, int], newcomer: Newcomer) -> None:
        waiting = self._waiting[key]
        del waiting[newcomer]
        if not waiting:
            del self._waiting[key]
        newcomer.refuse(
            ProtocolError(
                ErrorCode.UNKNOWN_GROUP, f"learner {key[0]} has no live group {key[1]:#018x}"
            )
        )


class Acceptor:
    """Listens, and holds every socket that has no group yet.

    Attributes:
        groups: the live groups.
        pool: memory for the messages of all groups.
        large: memory for HELLOs that are not read yet.
        connections: sockets open now, those of groups and those in handshakes included.
    """

    def __init__(
        self,
        sink: AcceptSink,
        *,
        learners: int,
        executor: Executor,
        timeouts: Timeouts | None = None,
        max_connections: int = 4096,
        tls: TlsDoor | None = None,
        report_bad_budget: bool = False,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        """
        Args:
            sink: judges HELLOs.
            learners: M; legal ids are 0..M-1.
            executor: scans tensors.
            timeouts: of sockets without a group, and of groups.
            max_connections: sockets beyond are closed at once.
            tls: for TLS on every socket.
            report_bad_budget: budget mode (C75).
            report: told, in words, of strangers who do not speak as this port does (S13); whoever
                can connect can make it be called, so it should keep a rate.
        """
        self.sink = sink
        self.learners = learners
        self.executor = executor
        self.timeouts = timeouts or Timeouts()
        self.report_bad_budget = report_bad_budget
        self.groups = GroupRegistry()
        self.connections = 0
        self.pool = SlabPool()
        self.large = Quota(LARGE_HELLOS_BYTES)
        self.pending: set[Newcomer] = set()
        self._max_connections = max_connections
        self._tls = tls
        self._report = report
        self._servers: list[asyncio.Server] = []

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen on every address of `host`; port 0 takes a free one.

        Returns:
            The first address and the port, as bound.

        Raises:
            OSError: an address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        flags = socket.AI_PASSIVE
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        bound: tuple[str, int] | None = None
        for family, _, _, _, address in dict.fromkeys(infos):
            where = (address[0], bound[1] if bound else port, *address[2:])
            sock = _listening(family, where)
            server = await loop.create_server(self._meet, sock=sock, backlog=BACKLOG)
            self._servers.append(server)
            bound = bound or sock.getsockname()[:2]
        if bound is None:
            raise OSError(f"{host} has no address")
        return bound

    def close(self) -> None:
        """Stop listening and drop the sockets that have no group; groups stay."""
        for server in self._servers:
            server.close()
        for newcomer in list(self.pending):
            newcomer.drop()

    def forget(self) -> None:
        """A socket is closed."""
        self.connections -= 1

    def hint_tls(self, peer: str) -> None:
        """Say that someone speaks TLS to a plain port (S13)."""
        self._report(f"{peer} sent TLS to this port, which is plain: no --tls-cert is given")

    def _meet(self) -> asyncio.BaseProtocol:
        if self.connections >= self._max_connections:
            return _Reject()
        self.connections += 1
        newcomer = Newcomer(self)
        self.pending.add(newcomer)
        if self._tls is None:
            return newcomer.stream

        def untrusted(problem: TlsProblem) -> None:
            """The TLS handshake has failed and the socket is closed (S13)."""
            newcomer.drop()
            self.forget()
            if problem is not CUT_OFF:  # as silent as on a plain port (section 9)
                self._report(f"no TLS with {endpoint.address}: {problem.reason}")

        endpoint = self._tls.wrap(newcomer.stream, untrusted)
        newcomer.guard(endpoint)
        return endpoint


class _Reject(asyncio.Protocol):
    """One socket too many: closed at once, silently (section 9)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        cast(asyncio.Transport, transport).abort()


def _listening(family: int, address: tuple[str | int, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
