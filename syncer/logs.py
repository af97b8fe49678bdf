"""What the syncer says on stderr: lines about learners within a rate, one line a round."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from wire import cli_support as cs

LOGGER = logging.getLogger("yeto.syncer")
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


_NUMBER = re.compile(r"\b(0x)?[0-9a-f]*[0-9][0-9a-f]*\b")
_MAX_KINDS = 256


class RateLimited:
    """Logs at most `burst` lines per `period` seconds and kind; then says how many it left out.

    Whoever may connect could otherwise fill the disk with log lines.
    """

    def __init__(
        self,
        burst: int = 20,
        period: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._period = period
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}

    def log(self, level: int, event: str, message: str, **fields: Any) -> None:
        """One line of the kind `event`; kinds are ours and few, never a client's text."""
        if LOGGER.isEnabledFor(level) and self._may(level, event):
            cs.log_event(LOGGER, level, event, message, **fields)

    def text(self, level: int, message: str) -> None:
        """One line of the coordinator's; lines that differ in their numbers are one kind."""
        if LOGGER.isEnabledFor(level) and self._may(level, _NUMBER.sub("#", message)[:80]):
            cs.log_event(LOGGER, level, "coordinator", message)

    def _may(self, level: int, kind: str) -> bool:
        now = self._clock()
        start, count = self._windows.get(kind, (now, 0))
        if now - start >= self._period:
            left_out = count - self._burst
            if left_out > 0:
                cs.log_event(
                    LOGGER,
                    level,
                    "left_out",
                    f"{left_out} more lines like this were left out: {kind}",
                    count=left_out,
                    kind=kind,
                )
            start, count = now, 0
        if kind not in self._windows and len(self._windows) >= _MAX_KINDS:
            self._windows.clear()
        self._windows[kind] = (start, count + 1)
        return count < self._burst


class Progress:
    """One line per committed round, or every `period` seconds when rounds are faster."""

    def __init__(self, period: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = period
        self._clock = clock
        self._last_line: float | None = None
        self._last_step = 0
        self.newest: Mapping[str, Any] | None = None

    def committed(self, record: Mapping[str, Any]) -> None:
        """Called with each commit record (C41); the newest one is kept."""
        self.newest = record
        now = self._clock()
        if self._last_line is not None and now - self._last_line < self._period:
            return
        step = record["step"]
        rounds = step - self._last_step
        rate = ""
        if self._last_line is not None and rounds > 1:
            rate = f", {rounds / (now - self._last_line):.1f} rounds/s"
        self._last_line, self._last_step = now, step
        answered, asked = len(record["responded"]), len(record["expected"])
        cs.log_event(
            LOGGER,
            logging.INFO,
            "round",
            f"round {step} fragment {record['fragment']}: {answered} of {asked} answered in "
            f"{record['ms']} ms, merge and commit {record['sync_ms']} ms{rate}",
            step=step,
            fragment=record["fragment"],
            responded=answered,
            expected=asked,
            ms=record["ms"],
            sync_ms=record["sync_ms"],
            gnorm=record["gnorm"],
        )
