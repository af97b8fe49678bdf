"""The options of `yeto-learner` (cli.md section 2) and what they add up to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from learner.config import BASELINE, LearnerConfig, parse_address
from learner.errors import ConfigError
from learner.tasks.base import TaskSettings, installed_tasks
from wire import cli_support as cs

F = TypeVar("F", bound=Callable[..., Any])

RUN_ID_BYTES = 1024
_ID_VARIABLES = ("YETO_LEARNER_ID", "RANK", "SLURM_PROCID")
_ID = cs.Whole(0, cs.U32_MAX)
_FILE = click.Path(path_type=Path)


def _is_address(text: str) -> bool:
    try:
        return text == BASELINE or parse_address(text) is not None
    except ConfigError:
        return False


def _is_run_id(text: str) -> bool:
    try:
        return 1 <= len(text.encode()) <= RUN_ID_BYTES
    except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
        return False


_ADDRESS = cs.CheckedText(_is_address, f"HOST:PORT, [IPv6]:PORT (port 1 to 65535) or {BASELINE}")
_RUN_ID = cs.CheckedText(_is_run_id, f"1 to {RUN_ID_BYTES} bytes of UTF-8")
_PROFILE = cs.CheckedText(
    lambda text: re.fullmatch("[0-9a-fA-F]{64}", text) is not None, "64 hexadecimal digits"
)
_TASK = cs.CheckedText(
    lambda text: text in installed_tasks(),
    f"an installed task: {', '.join(sorted(installed_tasks()))}",
)
_SWITCH = click.Choice(["on", "off"])
_ALPHA = 0.5
_ALPHA_OF_BLOCKING = 0.0  # classic DiLoCo goes on from the merged values


def _option(name: str, kind: Any, default: Any, text: str, metavar: str | None = None) -> Any:
    shown = default is not None
    return click.option(
        name, type=kind, default=default, show_default=shown, metavar=metavar, help=text
    )


_OPTIONS = (
    click.option(
        "--connect",
        type=_ADDRESS,
        required=True,
        metavar="HOST:PORT",
        help="Where the syncer listens; none = train alone, without a syncer.",
    ),
    _option(
        "--learner-id", _ID, None,
        "Id in the run; 0 initializes it. Default: YETO_LEARNER_ID, RANK, SLURM_PROCID, or 0.",
    ),
    _option("--fragments", cs.Whole(1), 8, "Requested number of fragments."),
    _option(
        "--fragment-pattern", click.Choice(["binpack", "strided"]), "binpack",
        "How tensors are put into fragments.",
    ),
    _option(
        "--matrix-merge", click.Choice(["rda", "iso"]), "rda", "How matrices are merged."
    ),
    _option(
        "--merge-alpha", cs.Real(0, 1, open_high=True), None,
        "Share of the local values in the blend with a broadcast "
        "[default: 0.5; 0 with --sync-every].",
    ),
    _option("--wire-dtype", click.Choice(["f32", "bf16", "q4"]), "bf16", "Session dtype."),
    _option("--streams", cs.Whole(0, 256), 4, "Data sockets beside the control socket."),
    _option(
        "--error-feedback", _SWITCH, "on", "Carry over what the wire dtype rounds away."
    ),
    _option("--run-id", _RUN_ID, None, "Name of the experiment; part of the contract.", "TEXT"),
    _option("--profile", _PROFILE, None, "Bind to the syncer profile of this hash.", "HEX"),
    _option(
        "--max-local-steps", cs.Whole(1), None,
        "Safety stop: exit 1 when reached before the final cut (exit 0 with --connect none).",
    ),
    _option(
        "--learner-budget-steps", cs.Whole(1, cs.U32_MAX), None,
        "Budget run: train exactly this many steps, then report and finalize.",
    ),
    _option(
        "--sync-every", cs.Whole(1), None,
        "Synchronous DiLoCo: every so many steps wait until all fragments are merged.",
    ),
    _option(
        "--seed", cs.Whole(0, cs.I64_MAX), 0,
        "The same on all learners: decides the initial parameters.",
    ),
    _option("--seq-len", cs.Whole(1), 256, "Tokens per sequence."),
    _option("--batch-size", cs.Whole(1), 8, "Sequences per optimizer step."),
    _option("--lr", cs.Real(0, open_low=True), 3e-4, "Inner learning rate."),
    _option("--task", _TASK, "bytes-lm", "Training task.", "NAME"),
    _option("--data", _FILE, None, "Text to train on, a file or a folder [default: built-in]."),
    _option("--layers", cs.Whole(1), 4, "Transformer blocks of the built-in model."),
    _option("--width", cs.Whole(1), 128, "Width of the built-in model."),
    _option("--heads", cs.Whole(1), 4, "Attention heads of the built-in model."),
    _option("--threads", cs.Whole(1, 4096), 1, "CPU threads for the training computation."),
    _option(
        "--eval-every-steps", cs.Whole(1), 50, "Optimizer steps between two held-out losses."
    ),
    _option("--output-dir", _FILE, None, "Folder for the final model and layout.json."),
    _option("--state-dir", _FILE, None, "Folder of the durable state; used at start if present."),
    _option("--state-every-steps", cs.Whole(1), 100, "Optimizer steps between two saves."),
    _option("--connect-timeout-s", cs.seconds(), 900.0, "Limit for the first connection."),
    click.option(
        "--auth-key-file",
        type=_FILE,
        multiple=True,
        metavar="FILE",
        help="Shared key of the run; the first one is used.  [env: YETO_AUTH_KEY_FILE]",
    ),
    _option("--tls-ca", _FILE, None, "CA of the syncer's certificate, PEM: speak TLS."),
    _option("--tls-cert", _FILE, None, "Certificate of this learner, PEM."),
    _option("--tls-key", _FILE, None, "Private key of --tls-cert, PEM."),
    _option(
        "--tls-server-name", click.STRING, None,
        "Name in the syncer's certificate [default: the host of --connect].",
    ),
    click.option(
        "--insecure", is_flag=True,
        help="Send the model to another machine without key and TLS.",
    ),
    cs.config_option("learner"),
    cs.logging_options,
    cs.version_option(),
)  # fmt: skip


def learner_options(function: F) -> F:
    """All options of `yeto-learner`, in the order of `--help`."""
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


def default_learner_id(environment: Mapping[str, str]) -> int:
    """The id when `--learner-id` is not given; every process is an island of its own here.

    Raises:
        click.UsageError: the first variable that is set holds no legal id.
    """
    for name in _ID_VARIABLES:
        text = environment.get(name, "")
        if text:
            try:
                return _ID.convert(text, None, None)
            except click.BadParameter as error:
                raise click.UsageError(
                    f"the learner id comes from {name}={text!r}, which must be "
                    f"{_ID.range_text()}; give --learner-id"
                ) from error
    return 0


@dataclass(frozen=True)
class Options:
    """The command line, checked: the learner's part, the task's part, and the program's own."""

    config: LearnerConfig
    task: str
    settings: TaskSettings
    threads: int
    eval_every_steps: int
    log_level: str
    log_format: str


def read_options(values: Mapping[str, Any]) -> Options:
    """Puts parsed values together (keys are the long option names with underscores).

    Raises:
        click.UsageError: options that contradict each other.
    """
    learner_id = values["learner_id"]
    if learner_id is None:
        learner_id = default_learner_id(os.environ)
    alpha = values["merge_alpha"]
    if alpha is None:
        alpha = _ALPHA if values["sync_every"] is None else _ALPHA_OF_BLOCKING
    try:
        config = LearnerConfig(
            connect=values["connect"],
            learner_id=learner_id,
            fragments=values["fragments"],
            fragment_pattern=values["fragment_pattern"],
            matrix_merge=values["matrix_merge"],
            alpha=alpha,
            wire_dtype=values["wire_dtype"],
            streams=values["streams"],
            error_feedback=values["error_feedback"] == "on",
            run_id=values["run_id"],
            profile=values["profile"],
            max_local_steps=values["max_local_steps"],
            learner_budget_steps=values["learner_budget_steps"],
            sync_every=values["sync_every"],
            output_dir=values["output_dir"],
            state_dir=values["state_dir"],
            state_every_steps=values["state_every_steps"],
            connect_timeout_s=values["connect_timeout_s"],
            auth_key_file=next(iter(values["auth_key_file"]), None),
            tls_ca=values["tls_ca"],
            tls_cert=values["tls_cert"],
            tls_key=values["tls_key"],
            tls_server_name=values["tls_server_name"],
            insecure=values["insecure"],
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    settings = TaskSettings(
        seed=values["seed"],
        learner_id=learner_id,
        seq_len=values["seq_len"],
        batch_size=values["batch_size"],
        lr=values["lr"],
        data=values["data"],
        layers=values["layers"],
        width=values["width"],
        heads=values["heads"],
    )
    return Options(
        config=config,
        task=values["task"],
        settings=settings,
        threads=values["threads"],
        eval_every_steps=values["eval_every_steps"],
        log_level=values["log_level"],
        log_format=values["log_format"],
    )
