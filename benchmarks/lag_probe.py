"""`yeto-syncer` with a probe in its event loop: how late timers fire while a round merges.

Run as a module; the first argument is the file that gets the samples (seconds, one per line) when
the process ends, the others are those of `yeto-syncer`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import click

from syncer import jobs, server
from syncer.options import resolve, syncer_options, worker_timeouts
from wire import cli_support as cs
from wire.loop import new_event_loop

PERIOD = 0.002
"""Seconds between two looks at the clock."""

_merging = threading.Event()


def watched(merge: Any) -> Any:
    """Notes when a merge runs; everything else is the product's own code."""

    def run(*arguments: Any, **named: Any) -> Any:
        _merging.set()
        try:
            return merge(*arguments, **named)
        finally:
            _merging.clear()

    return run


class Probe:
    """Samples the lateness of a timer while a merge runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.samples: list[float] = []
        self._loop = loop
        self._due = 0.0
        self._next()

    def _next(self) -> None:
        self._due = self._loop.time() + PERIOD
        self._loop.call_later(PERIOD, self._look)

    def _look(self) -> None:
        if _merging.is_set():
            self.samples.append(max(0.0, self._loop.time() - self._due))
        self._next()


@click.command()
@syncer_options
@click.pass_context
def main(context: click.Context, /, **values: Any) -> None:
    """The same options as `yeto-syncer`."""
    options = resolve(values, context)
    cs.setup_logging(options.log_level, options.log_format)
    probes: list[Probe] = []

    def probed_loop() -> asyncio.AbstractEventLoop:
        loop = new_event_loop()
        probes.append(Probe(loop))
        return loop

    jobs.merge_round = watched(jobs.merge_round)  # type: ignore[attr-defined]
    code = server.run(options, worker_timeouts(os.environ), probed_loop)
    OUTPUT.write_text("".join(f"{sample}\n" for sample in probes[0].samples))
    context.exit(code)


if __name__ == "__main__":
    OUTPUT = Path(sys.argv[1])
    main(args=sys.argv[2:], prog_name="yeto-syncer")
