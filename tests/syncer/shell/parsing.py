"""A command line parsed by the syncer's own options, without starting anything."""

from __future__ import annotations

import click
from click.testing import CliRunner

from syncer.options import SyncerOptions, resolve, syncer_options


@click.command()
@syncer_options
@click.pass_context
def program(context: click.Context, **values: object) -> None:
    context.obj.append(resolve(values, context))


def parse(*arguments: str) -> SyncerOptions:
    found: list[SyncerOptions] = []
    result = CliRunner().invoke(program, arguments, obj=found)
    assert result.exit_code == 0, result.output
    return found[0]
