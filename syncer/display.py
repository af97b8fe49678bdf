"""A live line below the log, when stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from syncer.actor import Actor

REFRESHES_PER_S = 4


class StatusLine:
    """Renders who is connected and how far the run is; read by the display's own thread."""

    def __init__(self, actor: Actor, clock: Callable[[], float] = time.monotonic) -> None:
        self._actor = actor
        self._clock = clock
        self._start = clock()
        self._seen: tuple[float, int] | None = None
        self._rate = 0.0

    def __rich__(self) -> Text:
        """One line."""
        now = self._clock()
        parts = [f"{len(self._actor.links)} learners"]
        record = self._actor.progress.newest
        if record is None:
            parts.append("waiting for the first round")
        else:
            parts += self._round(record, now)
        parts.append(time.strftime("%H:%M:%S", time.gmtime(now - self._start)))
        return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")

    def _round(self, record: Any, now: float) -> list[str]:
        step = record["step"]
        if self._seen is None:
            self._seen = (now, step)
        elif now - self._seen[0] >= 1:
            self._rate = (step - self._seen[1]) / (now - self._seen[0])
            self._seen = (now, step)
        return [
            f"round {step} of fragment {record['fragment']}",
            f"{len(record['responded'])} of {len(record['expected'])} answered",
            f"gradient norm {record['gnorm']:.3g}",
            f"{self._rate:.1f} rounds/s",
        ]


def status_line(actor: Actor, log_format: str) -> contextlib.AbstractContextManager[object]:
    """Shows a `StatusLine` while it is entered; does nothing where nobody would see it."""
    if log_format != "text" or not sys.stderr.isatty():
        return contextlib.nullcontext()
    return Live(
        StatusLine(actor),
        console=Console(stderr=True),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
    )
