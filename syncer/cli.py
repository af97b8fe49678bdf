"""`yeto-syncer` (cli.md section 1)."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import click

from syncer.options import resolve, syncer_options, worker_timeouts
from wire import cli_support as cs


class StopBeforeStart(BaseException):
    """A signal came before the listener was up: nothing to finalize (C82)."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopBeforeStart


@click.group(invoke_without_command=True)
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        # Here and not above: torch takes more than a second, a usage error should not.
        from syncer.server import run  # noqa: PLC0415

        code = run(options, timeouts)
    except StopBeforeStart:
        code = 1 if options.mark_final_checkpoint else 0
        click.echo("stopped by a signal before the start", err=True)
    context.exit(code)
