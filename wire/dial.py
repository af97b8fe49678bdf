"""The learner's way in: a whole group of sockets, or nothing (L10)."""

from __future__ import annotations

import asyncio
import ssl as tls
from collections.abc import Callable
from concurrent.futures import Executor

from wire.frames import MessageType, Role, frame_header
from wire.group import Group, GroupSink, SendCounters, Timeouts
from wire.limits import Session
from wire.memory import SlabPool
from wire.messages import DataHello, Hello, encode_frame, encode_hello
from wire.stream import Stream
from wire.tls_stream import TlsDoor, connect


async def dial(
    host: str,
    port: int,
    hello: Hello,
    *,
    sink: GroupSink,
    executor: Executor,
    counters: SendCounters,
    timeouts: Timeouts | None = None,
    ssl: tls.SSLContext | None = None,
    server_name: str | None = None,
    seal: Callable[[bytes], bytes] | None = None,
    pool: SlabPool | None = None,
) -> Group:
    """Connect the control socket, write HELLO, then connect the S data sockets.

    Messages may reach `sink` before this returns, an ERROR for example. When it raises, all sockets
    are closed and `on_closed` is not called.

    Args:
        counters: the client's own, the same for every dial of its life (W26).
        timeouts: `dial` bounds the whole of it.
        ssl: for TLS; `server_name` is the name that the certificate must hold, else `host`.
        seal: makes the HELLO payload from its body (S1).
        pool: memory for messages; None: one of the group's own.

    Raises:
        OSError: no connection in time, or it was closed at once. TlsFailure is one.
        ProtocolError: the other side broke the protocol at once.
    """
    timeouts = timeouts or Timeouts()
    stall = timeouts.stall
    door = None
    if ssl is not None:
        door = TlsDoor(Role.LEARNER, lambda: ssl, server_name or host)
    group = Group(
        session=Session(Role.LEARNER, hello.layout, hello.dtype, hello.learner_id),
        generation=hello.generation,
        num_streams=hello.num_streams,
        sink=sink,
        executor=executor,
        timeouts=timeouts,
        counters=counters,
        pool=pool,
    )

    async def add(index: int, first: bytes) -> None:
        stream = Stream(group.connection(), group, stall)
        await _connect(stream, host, port, door)
        stream.put((first,))
        stream.flush()
        group.attach(index, stream)

    body = encode_hello(hello)
    payload = body if seal is None else seal(body)
    try:
        async with asyncio.timeout(timeouts.dial):
            await add(0, frame_header(MessageType.HELLO, len(payload)) + payload)
            async with asyncio.TaskGroup() as tasks:
                for index in range(hello.num_streams):
                    data = DataHello(hello.learner_id, hello.generation, index)
                    tasks.create_task(add(index + 1, encode_frame(data)))
        group.confirm()
    except BaseException as error:
        group.close()
        if group.fault is not None:
            raise group.fault from error
        reason = _reason(error, f"no connection to {host}:{port} in {timeouts.dial:g} s")
        if reason is error:
            raise
        raise reason from error
    return group


async def _connect(stream: Stream, host: str, port: int, door: TlsDoor | None) -> None:
    if door is None:
        await asyncio.get_running_loop().create_connection(lambda: stream, host, port)
    else:
        await connect(door, stream, host, port)


def _reason(error: BaseException, late: str) -> BaseException:
    """The one error to raise: the first of several, a time-out in words, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return TimeoutError(late) if isinstance(error, TimeoutError) else error
