"""Writes to a socket past its transport, during which other threads of the process may run.

uvloop keeps the interpreter lock while the kernel copies what it writes first. For a bulk slice
those are hundreds of microseconds in which a training thread of the same process can't start its
next operation. `sendmsg` lets the lock go, and copies no more than the transport does.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable

from wire.messages import Buffer

PARTS_PER_CALL = 64
"""Buffers of one system call; every system takes more."""


class DirectWriter:
    """The writing side of a connected socket whose transport only reads from now on.

    Attributes:
        unsent: bytes that the kernel has not taken.
    """

    def __init__(
        self,
        fd: int,
        on_blocked: Callable[[], None],
        on_drained: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        self.unsent = 0
        # A descriptor of its own: the loop watches the transport's for reading.
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._on_blocked = on_blocked
        self._on_drained = on_drained
        self._on_error = on_error
        self._parts: deque[memoryview] = deque()
        self._waiting = False

    def write(self, parts: Iterable[Buffer]) -> None:
        """Send in order, without a copy; `on_blocked` is called when the kernel is full."""
        for part in parts:
            if part:
                view = memoryview(part).cast("B")
                self._parts.append(view)
                self.unsent += len(view)
        if not self._waiting:
            self._send()

    def close(self) -> None:
        """Drop what is unsent. The connection ends when its transport is closed too."""
        self._wait(False)
        self._parts.clear()
        self.unsent = 0
        self._socket.close()

    def _send(self) -> None:
        while self._parts:
            parts = [self._parts[i] for i in range(min(len(self._parts), PARTS_PER_CALL))]
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._wait(False)
                self._on_error(error)
                return
            self._took(sent)
            if sent < sum(map(len, parts)):
                self._wait(True)
                return
        self._wait(False)

    def _took(self, count: int) -> None:
        self.unsent -= count
        while count:
            first = self._parts[0]
            if count < len(first):
                self._parts[0] = first[count:]
                return
            count -= len(first)
            self._parts.popleft()

    def _wait(self, waiting: bool) -> None:
        if waiting == self._waiting:
            return
        self._waiting = waiting
        if waiting:
            self._loop.add_writer(self._socket.fileno(), self._send)
            self._on_blocked()
        else:
            self._loop.remove_writer(self._socket.fileno())
            if not self.unsent:
                self._on_drained()
