"""Writes past a transport: every byte in order, whatever the kernel takes at a time."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wire import loop
from wire.direct import PARTS_PER_CALL, DirectWriter

SMALL_BUFFER = 4096


class Owner:
    """Counts what a writer says, and waits for it."""

    def __init__(self) -> None:
        self.blocked = 0
        self.drained = asyncio.Event()
        self.errors: list[OSError] = []
        self.failed = asyncio.Event()

    def on_blocked(self) -> None:
        self.blocked += 1
        self.drained.clear()

    def on_error(self, error: OSError) -> None:
        self.errors.append(error)
        self.failed.set()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    with ours, theirs:
        yield ours, theirs


def writer(ours: socket.socket, owner: Owner) -> DirectWriter:
    return DirectWriter(ours.fileno(), owner.on_blocked, owner.drained.set, owner.on_error)


def read_all(theirs: socket.socket, into: bytearray) -> None:
    while piece := theirs.recv(700):
        into += piece


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    batches=st.lists(
        st.lists(
            st.binary(max_size=40) | st.integers(1, 30_000).map(bytes), max_size=PARTS_PER_CALL + 9
        ),
        min_size=1,
        max_size=4,
    )
)
def test_w47_every_byte_arrives_in_order(batches: list[list[bytes]]) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    expected = b"".join(b"".join(batch) for batch in batches)
    arrived = bytearray()
    reader = threading.Thread(target=read_all, args=(theirs, arrived))

    async def send() -> None:
        owner = Owner()
        direct = writer(ours, owner)
        for batch in batches:
            direct.write(batch)
        assert (direct.unsent > 0) == (owner.blocked > 0 and not owner.drained.is_set())
        reader.start()
        if direct.unsent:
            await asyncio.wait_for(owner.drained.wait(), 30)
        assert direct.unsent == 0
        direct.close()

    with ours, theirs:
        loop.run(send())
        ours.close()
        reader.join(30)
    assert bytes(arrived) == expected


def test_who_is_blocked_hears_of_it_once_each_way(pair) -> None:
    ours, theirs = pair

    async def send() -> None:
        owner = Owner()
        direct = writer(ours, owner)
        direct.write([b"few"])
        assert (owner.blocked, direct.unsent) == (0, 0)
        assert not owner.drained.is_set()
        direct.write([bytes(100_000)])
        direct.write([bytes(100_000)])
        assert owner.blocked == 1
        assert 100_000 < direct.unsent <= 200_000
        reader = threading.Thread(target=read_all, args=(theirs, bytearray()))
        reader.start()
        await asyncio.wait_for(owner.drained.wait(), 30)
        assert (owner.blocked, direct.unsent) == (1, 0)
        direct.close()
        ours.close()
        reader.join(30)

    loop.run(send())


def test_a_lost_peer_is_an_error_now_or_later(pair) -> None:
    ours, theirs = pair

    async def send() -> None:
        owner = Owner()
        direct = writer(ours, owner)
        direct.write([bytes(100_000)])
        theirs.close()
        await asyncio.wait_for(owner.failed.wait(), 30)
        direct.write([b"more"])
        assert len(owner.errors) == 2
        assert all(isinstance(error, ConnectionError) for error in owner.errors)
        direct.close()

    loop.run(send())


def test_a_closed_writer_drops_the_rest_and_frees_its_descriptor(pair) -> None:
    ours, theirs = pair

    async def send() -> None:
        owner = Owner()
        direct = writer(ours, owner)
        direct.write([bytes(100_000)])
        direct.close()
        assert direct.unsent == 0
        assert not owner.drained.is_set()

    loop.run(send())
    ours.close()
    theirs.settimeout(30)
    arrived = bytearray()
    read_all(theirs, arrived)  # ends: no descriptor of the other side is left
    assert 0 < len(arrived) < 100_000
