"""What `yeto-syncer` and `yeto-learner` share on the command line (cli.md, Common).

It lives in `wire` because the two programs may not import each other; nothing else in `wire`
imports click. Numbers are checked strictly: no NaN, no infinities, no underscores, and an error
always names the flag, the value and the legal range.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from wire.errors import one_line

if TYPE_CHECKING:  # generic in newer versions of click only
    _AnyType = click.ParamType[Any]
    _IntType = click.ParamType[int]
    _FloatType = click.ParamType[float]
    _TextType = click.ParamType[str]
    _TupleType = click.ParamType[tuple[Any, ...]]
else:
    _AnyType = _IntType = _FloatType = _TextType = _TupleType = click.ParamType

MAX_DURATION_S = 31_536_000
MAX_DURATION_MS = MAX_DURATION_S * 1000
U32_MAX = 2**32 - 1
I64_MAX = 2**63 - 1

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MAX_DIGITS = 4000  # Python refuses to parse longer integers with a message of its own

F = TypeVar("F", bound=Callable[..., Any])


def flag_name(param: click.Parameter | None) -> str:
    """The long option as typed, e.g. `--grace-ms`."""
    if param is None:
        return "value"
    return next((opt for opt in param.opts if opt.startswith("--")), param.name or "value")


class Whole(_IntType):
    """An integer in [low, high]; either end may be absent (None)."""

    name = "integer"

    def __init__(self, low: int | None = None, high: int | None = None) -> None:
        self.low = low
        self.high = high

    def range_text(self) -> str:
        if self.low is not None and self.high is not None:
            return f"an integer from {self.low} to {self.high}"
        if self.low is not None:
            return f"an integer >= {self.low}"
        if self.high is not None:
            return f"an integer <= {self.high}"
        return "an integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            self._refuse(value, param, ctx)
        if isinstance(value, str):
            if len(value) > _MAX_DIGITS or not _WHOLE.fullmatch(value):
                self._refuse(value, param, ctx)
            value = int(value)
        if self.low is not None and value < self.low:
            self._refuse(value, param, ctx)
        if self.high is not None and value > self.high:
            self._refuse(value, param, ctx)
        return int(value)

    def _refuse(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> NoReturn:
        shown = str(value)[:80]
        self.fail(f"{shown!r}: {flag_name(param)} must be {self.range_text()}", param, ctx)


class Real(_FloatType):
    """A finite float in an interval; `open_low` / `open_high` exclude that end."""

    name = "float"

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        open_low: bool = False,
        open_high: bool = False,
    ) -> None:
        self.low = low
        self.high = high
        self.open_low = open_low
        self.open_high = open_high

    def range_text(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'>' if self.open_low else '>='} {self.low:g}")
        if self.high is not None:
            high = f"{self.high:g}" if self.high != int(self.high) else str(int(self.high))
            parts.append(f"{'<' if self.open_high else '<='} {high}")
        return " ".join(["a finite number", " and ".join(parts)]).strip()

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            self._refuse(value, param, ctx)
        if isinstance(value, str) and not _REAL.fullmatch(value):
            self._refuse(value, param, ctx)
        try:
            number = float(value)
        except OverflowError:  # a TOML integer beyond the floats
            self._refuse(value, param, ctx)
        if not math.isfinite(number) or not self._inside(number):
            self._refuse(value, param, ctx)
        return number

    def _inside(self, number: float) -> bool:
        if self.low is not None and (number < self.low or (self.open_low and number == self.low)):
            return False
        return self.high is None or not (
            number > self.high or (self.open_high and number == self.high)
        )

    def _refuse(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> NoReturn:
        shown = str(value)[:80]
        self.fail(f"{shown!r}: {flag_name(param)} must be {self.range_text()}", param, ctx)


class Commas(_TupleType):
    """A non-empty comma separated list (an array in TOML) of one element type -> tuple."""

    name = "list"

    def __init__(self, element: _AnyType, *, distinct: bool = False) -> None:
        self.element = element
        self.distinct = distinct

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        pieces = value.split(",") if isinstance(value, str) else list(value)
        pieces = [piece.strip() if isinstance(piece, str) else piece for piece in pieces]
        if not pieces or any(piece == "" for piece in pieces):
            self.fail(
                f"{value!r}: {flag_name(param)} must be a non-empty comma separated list",
                param,
                ctx,
            )
        items = tuple(self.element.convert(piece, param, ctx) for piece in pieces)
        if self.distinct and len(set(items)) != len(items):
            self.fail(f"{value!r}: {flag_name(param)} must not name anything twice", param, ctx)
        return items


class CheckedText(_TextType):
    """A text that `check` accepts; `legal` says in words which texts those are."""

    name = "text"

    def __init__(self, check: Callable[[str], bool], legal: str) -> None:
        self._check = check
        self._legal = legal

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not self._check(value):
            self.fail(f"{value[:80]!r}: {flag_name(param)} must be {self._legal}", param, ctx)
        return str(value)


def seconds(*, zero: bool = False) -> Real:
    """A duration in seconds: > 0 (or >= 0) and at most 31,536,000."""
    return Real(0, MAX_DURATION_S, open_low=not zero)


def whole_seconds(low: int = 1) -> Whole:
    """A duration in whole seconds, at most 31,536,000."""
    return Whole(low, MAX_DURATION_S)


def milliseconds(low: int = 0) -> Whole:
    """A duration in whole milliseconds, at most 31,536,000 s."""
    return Whole(low, MAX_DURATION_MS)


# -- --config ------------------------------------------------------------------------------------

_TABLES = ("syncer", "learner")
_NOT_IN_FILES = ("config", "help", "version")


def config_option(table: str) -> Callable[[F], F]:
    """`--config FILE.toml`: defaults of the other options, from top level or `[table]`.

    Keys are long option names with `-` or `_`. The other program's table is skipped, so one file
    can serve both. Unknown keys, wrong types and a key given twice in one table are usage errors
    (exit 2). A key of the own table wins over one at top level; a flag wins over both.
    """

    def load(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            document = tomllib.loads(Path(value).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise click.BadParameter(f"cannot read {value}: {error}", ctx, param) from error
        own = document.get(table, {})
        if not isinstance(own, dict):
            raise click.BadParameter(f"{value}: [{table}] must be a table", ctx, param)
        top = {key: item for key, item in document.items() if key not in _TABLES}
        options = _options_by_key(ctx.command)
        ctx.default_map = {
            **_checked(top, options, value, ctx, param),
            **_checked(own, options, value, ctx, param),
        }
        return value

    return click.option(
        "--config",
        metavar="FILE.toml",
        is_eager=True,
        callback=load,
        help="Defaults of the other options, from a TOML file.",
    )


def _options_by_key(command: click.Command) -> dict[str, click.Option]:
    found = {}
    for param in command.params:
        if isinstance(param, click.Option):
            for opt in param.opts:
                if opt.startswith("--") and opt[2:] not in _NOT_IN_FILES:
                    found[opt[2:].replace("-", "_")] = param
    return found


def _checked(
    entries: Mapping[str, Any],
    options: Mapping[str, click.Option],
    path: str,
    ctx: click.Context,
    param: click.Parameter,
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in entries.items():
        option = options.get(key.replace("-", "_"))
        if option is None or option.name is None:
            raise click.BadParameter(f"{path}: unknown key {key!r}", ctx, param)
        if option.name in values:
            raise click.BadParameter(f"{path}: key {key!r} is given twice", ctx, param)
        wanted = _wrong_type(option, value)
        if wanted:
            raise click.BadParameter(
                f"{path}: key {key!r} must be {wanted}, not {value!r}", ctx, param
            )
        if isinstance(option.type, Whole | Real | Commas):  # also if a flag will win over it
            option.type_cast_value(ctx, value)
        # An option that may be repeated takes one text as well as an array of them.
        single = option.multiple and isinstance(value, str)
        values[option.name] = [value] if single else value
    return values


def _wrong_type(option: click.Option, value: Any) -> str | None:
    """What the TOML value should have been, or None when its type is right."""
    if option.is_flag:
        return None if isinstance(value, bool) else "true or false"
    if option.multiple and not isinstance(value, list):
        return _wrong_scalar(option.type, value)
    if option.multiple or isinstance(option.type, Commas):
        if not isinstance(value, list):
            return "an array"
        element = option.type.element if isinstance(option.type, Commas) else option.type
        wanted = [_wrong_scalar(element, item) for item in value]
        return next((f"an array, each element {text}" for text in wanted if text), None)
    return _wrong_scalar(option.type, value)


def _wrong_scalar(kind: _AnyType, value: Any) -> str | None:
    if isinstance(kind, Whole):
        return None if isinstance(value, int) and not isinstance(value, bool) else "an integer"
    if isinstance(kind, Real):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if number else "a number"
    return None if isinstance(value, str) else "a string"


# -- logging -------------------------------------------------------------------------------------


def logging_options(function: F) -> F:
    """`--log-level` and `--log-format`; give both values to `setup_logging`."""
    function = click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Lines on stderr: plain text or one JSON object each.",
    )(function)
    return click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Least severity that is printed on stderr.",
    )(function)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now, so that a live display can redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("the stream is always sys.stderr")


class TextFormatter(logging.Formatter):
    """`12:00:01 message` on one line; warnings and errors carry their level's name."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"{clock} {level}{one_line(record.getMessage())}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text


class JsonFormatter(logging.Formatter):
    """One object a line: ts (Unix seconds), level, logger, event, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def setup_logging(level: str, log_format: str) -> None:
    """Sends all records of at least `level` to stderr, in `log_format` (text or json)."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log_event(logger: logging.Logger, level: int, event: str, message: str, **fields: Any) -> None:
    """One line for people (`message`) that is also one object for programs (event + fields)."""
    logger.log(level, "%s", message, extra={"fields": {"event": event, **fields}})


# -- the rest ------------------------------------------------------------------------------------


class Command(click.Command):
    """A program that says what is wrong in one line, whatever its command line was (cli.md)."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """See `click.Command`; an output that can't be written is told too, with exit code 1."""
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        try:
            code = run(*args, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.UsageError as error:
            if type(error).show is not click.UsageError.show:  # no arguments at all: the help
                error.show()
            else:
                hint = "" if error.ctx is None else f" (see {error.ctx.command_path} --help)"
                click.echo(f"Error: {one_line(error.format_message())}{hint}", err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("Aborted!", err=True)
            sys.exit(1)
        except OSError as error:
            click.echo(f"Error: {one_line(str(error))}", err=True)
            # What is left in the buffer would be tried, and complained of, again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


class Group(Command, click.Group):
    """A `Command` with subcommands."""


def version_option() -> Callable[[F], F]:
    """`--version`: program and version, exit 0."""
    return click.version_option(package_name="yeto", message="%(prog)s %(version)s")
