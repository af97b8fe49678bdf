"""Two processes on loopback, and several ways to move the same bytes between them.

A transfer is one message to the far process and its short answer, or a short question and the
message that comes back; the ways take turns, transfer by transfer, so that all of them see the same
machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

HOST = "127.0.0.1"


class Setup(NamedTuple):
    """One way to move messages.

    Attributes:
        kind: its name.
        size: bytes of a message.
        streams: sockets that carry it.
        learners: connections or groups that each get the message.
        directory: where keys lie, for TLS.
    """

    kind: str
    size: int
    streams: int
    learners: int = 1
    directory: str = ""


class End(Protocol):
    """What one process holds of a way."""

    def transfer(self) -> None:
        """One message, from this end's side."""

    def close(self) -> Mapping[str, float]:
        """Close the sockets; facts about all transfers."""


FarMaker = Callable[[Setup, Callable[[int], None]], End]
"""Listens, calls the second argument with the port, accepts."""
NearMaker = Callable[[Setup, int], End]
"""Connects to the port."""


def serve(pipe: Connection, makers: Mapping[str, FarMaker]) -> None:
    """The far process: do as the near one says until it says None."""
    ends: dict[Setup, End] = {}
    while (order := pipe.recv()) is not None:
        verb, setup = order
        if verb == "open":
            ends[setup] = makers[setup.kind](setup, pipe.send)
        elif verb == "close":
            pipe.send(ends.pop(setup).close())
        else:
            pipe.send("ready")
            ends[setup].transfer()


class Pair:
    """Both ends of a way, seen from the near process.

    Attributes:
        end: the near one.
    """

    def __init__(self, pipe: Connection, setup: Setup, maker: NearMaker) -> None:
        self._pipe = pipe
        self._setup = setup
        pipe.send(("open", setup))
        self.end = maker(setup, pipe.recv())

    def transfer(self) -> float:
        """One message; seconds until this side has all of it or its answer."""
        self._pipe.send(("move", self._setup))
        self._pipe.recv()
        start = time.perf_counter()
        self.end.transfer()
        return time.perf_counter() - start

    def close(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Facts about all transfers, of this end and of the far one."""
        self._pipe.send(("close", self._setup))
        near = self.end.close()
        return near, self._pipe.recv()


def take_turns(pairs: Sequence[Pair], repeats: int, warm: int) -> list[list[float]]:
    """Seconds of `repeats` transfers of each, in turns, after `warm` that do not count.

    At first windows open and memory is touched for the first time.
    """
    seconds: list[list[float]] = [[] for _ in pairs]
    for index in range(warm + repeats):
        for taken, pair in zip(seconds, pairs, strict=True):
            spent = pair.transfer()
            if index >= warm:
                taken.append(spent)
    return seconds
