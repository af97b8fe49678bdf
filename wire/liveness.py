"""The clock of a group: how long it may be silent, and who looks (section 10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

CHECKS = 8
"""Checks per timeout."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds.

    Attributes:
        handshake: for the first frame, and for a data socket to find its group (W7, W17).
        heartbeat: silence of a group that has sent a HEARTBEAT; syncer only (W43).
        stall: output or reassembly without progress, and TCP_USER_TIMEOUT (W4, W32, W44).
        linger: for an ERROR to reach the peer (W38).
        dial: for all sockets of a new group; learner only (L11).
    """

    handshake: float = 10.0
    heartbeat: float = 60.0
    stall: float = 60.0
    linger: float = 1.0
    dial: float = 30.0


class Watch:
    """Calls `check(now)` often enough to notice every timeout within an eighth of it."""

    def __init__(self, timeouts: Timeouts, check: Callable[[float], None]) -> None:
        self._pause = min(timeouts.heartbeat, timeouts.stall) / CHECKS
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + self._pause
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        """Check no more."""
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        late = now - self._due
        self._due = now + self._pause
        self._timer = self._loop.call_at(self._due, self._tick)
        if late < self._pause:  # else the loop itself stood still: let it read first
            self._check(now)
