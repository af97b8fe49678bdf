"""`yeto-syncer` (cli.md section 1)."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click

from syncer.logs import LOGGER
from syncer.options import resolve, syncer_options, worker_timeouts
from wire import cli_support as cs


class StopBeforeStart(BaseException):
    """A signal came before the listener was up: nothing to finalize (C82)."""


class EarlySignals:
    """SIGINT and SIGTERM before the event loop takes them over.

    While libraries load a signal is only noted: what they do with an exception is not ours to
    say. After `interrupt` it breaks off whatever the start is waiting for.
    """

    def __init__(self) -> None:
        self._interrupts = False
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._interrupts:
            raise StopBeforeStart

    def interrupt(self) -> None:
        """From now on a signal, and one that came before, raises `StopBeforeStart`."""
        self._interrupts = True
        if self._came:
            raise StopBeforeStart


class Program(cs.Group):
    """Options for a run, and the subcommand `keys`, which is loaded only when it is wanted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See `click.Group`."""
        return ["keys"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See `click.Group`."""
        if cmd_name != "keys":
            return None
        from syncer.keys import keys  # noqa: PLC0415

        return keys


@click.group(cls=Program, invoke_without_command=True)
@syncer_options
@click.pass_context
def main(context: click.Context, /, **values: Any) -> None:
    """Merge what learners send in time, and send the result back.

    `yeto-syncer --quorum 3 --checkpoint-every 1` waits for three learners on 127.0.0.1:29400.
    Ctrl-C finalizes: every learner gets the exact final cut.
    """
    if context.invoked_subcommand is not None:
        return
    options = resolve(values, context)
    timeouts = worker_timeouts(os.environ)
    if options.print_profile:
        click.echo(options.profile.digest().hex())
        return
    cs.setup_logging(options.log_level, options.log_format)
    signals = EarlySignals()
    # What the libraries make is there to stay. Collecting it again and again would make the start
    # slower by a fifth, and later stop the event loop for hundreds of milliseconds (C1).
    gc.disable()
    # Here and not above: torch takes more than a second, a usage error should not.
    from syncer.server import run  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    try:
        signals.interrupt()
        code = run(options, timeouts)
    except StopBeforeStart:
        # C82, C83: there is no final checkpoint, and no consolidation, to come.
        promised = options.mark_final_checkpoint or options.learner_budget_steps is not None
        code = 1 if promised else 0
        LOGGER.warning("stopped by a signal before the start")
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once: everything is written and closed.

    A merge may still run in its thread; nobody wants its result, and an ordinary exit would wait
    for it, and then take the libraries down one by one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
