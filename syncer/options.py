"""Every option of `yeto-syncer`, its range and what it must agree with (cli.md section 1).

Nothing here opens a file, a socket or torch: `--print-profile` and a usage error answer at once.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from wire import cli_support as cs
from wire.identity import SyncerProfile

U64_MAX = 2**64 - 1
DEFAULT_IDS = 256
CHECKPOINT_SUFFIXES = ("", ".tmp", ".prev", ".sums", ".sums.tmp", ".final", ".final.tmp", ".lock")
"""Names beside `--checkpoint-path` that no other option may use (checkpoint.md)."""
BACKENDS = {"scalar": 0, "torch-svd": 1}
WORKER_TIMEOUTS = {"STARTUP": 300, "REQUEST": 3540, "DRAIN": 3600}
"""Defaults of YETO_ISO_WORKER_*_TIMEOUT_S in seconds (N31)."""

_DIGITS = re.compile(r"[0-9]{1,12}")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerOptions:
    """All options after parsing, defaults resolved; durations in the unit of their name.

    `warnings` are complaints about options that have no effect here, to be logged at start.
    """

    host: str
    port: int
    ready_file: str | None
    learners: int
    quorum: int
    grace_ms: int
    grace_gamma: float
    grace_tau: float
    pipeline: int
    min_round_interval_ms: int
    sync_interval_steps: float
    delta_correction: str
    quorum_timeout_s: int
    final_ack_timeout_s: int
    total_steps: int | None
    outer_lr: float
    outer_momentum: float
    outer_lr_by_fragment: tuple[float, ...] | None
    learner_weight: str
    max_base_lag: int | None
    iso_backend: str
    iso_rank_cutoff: float | None
    iso_worker_python: str | None
    iso_worker_devices: tuple[str, ...]
    iso_worker_queue_capacity: int
    checkpoint_path: str
    checkpoint_every: int
    resume: bool
    mark_final_checkpoint: bool
    final_state: str | None
    event_tape: str | None
    learner_budget_steps: int | None
    require_profile_binding: bool
    print_profile: bool
    handshake_timeout_s: float
    heartbeat_timeout_s: float
    stall_timeout_s: float
    max_connections: int
    auth_key_file: tuple[str, ...]
    tls_cert: str | None
    tls_key: str | None
    tls_client_ca: str | None
    insecure: bool
    config: str | None
    log_level: str
    log_format: str
    warnings: tuple[str, ...] = ()

    @property
    def profile(self) -> SyncerProfile:
        """The fields that the profile hash covers (W22, W23)."""
        return SyncerProfile(
            learners=self.learners,
            quorum=self.quorum,
            grace_ms=self.grace_ms,
            grace_gamma=self.grace_gamma,
            grace_tau=self.grace_tau,
            pipeline=self.pipeline,
            min_round_interval_ms=self.min_round_interval_ms,
            sync_interval_steps=self.sync_interval_steps,
            heloco=self.delta_correction == "heloco",
            quorum_timeout_s=self.quorum_timeout_s,
            final_ack_timeout_s=self.final_ack_timeout_s,
            total_steps=self.total_steps or 0,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            checkpoint_every=self.checkpoint_every,
            resume=self.resume,
            mark_final_checkpoint=self.mark_final_checkpoint,
            learner_budget_steps=self.learner_budget_steps,
            max_base_lag=self.max_base_lag,
            equal_weights=self.learner_weight == "equal",
            require_profile_binding=self.require_profile_binding,
            outer_lr_by_fragment=self.outer_lr_by_fragment,
            iso_rank_cutoff=self.iso_rank_cutoff,
            iso_backend=BACKENDS[self.iso_backend],
        )


def _option(name: str, kind: click.ParamType[Any], default: Any, text: str) -> Callable[[F], F]:
    return click.option(
        name, type=kind, default=default, show_default=default is not None, help=text
    )


def _flag(name: str, text: str) -> Callable[[F], F]:
    return click.option(name, is_flag=True, help=text)


_MOMENTUM = cs.Real(0, 1, open_high=True)
_RATE = cs.Real(0, open_low=True)
_PATH = click.STRING

OPTIONS: tuple[Callable[[Any], Any], ...] = (
    _option("--host", click.STRING, "127.0.0.1", "Address to listen on."),
    _option("--port", cs.Whole(0, 65535), 29400, "Port to listen on; 0 takes any free one."),
    _option("--ready-file", _PATH, None, "JSON with the bound address, once learners may connect."),
    _option(
        "--learners",
        cs.Whole(1, cs.U32_MAX),
        None,
        "Legal ids are 0 to this - 1.  [default: max(256, quorum)]",
    ),
    _option("--quorum", cs.Whole(1, cs.U32_MAX), 1, "Learners whose answers make a round."),
    _option("--grace-ms", cs.milliseconds(), 1000, "Longest wait for more answers, after quorum."),
    _option("--grace-gamma", cs.Real(0, 1), 0.8, "Share of the predicted slack given as grace."),
    _option("--grace-tau", cs.Real(0), 2.0, "Inner steps that a round may take before a blend."),
    _option("--pipeline", cs.Whole(1, cs.U32_MAX), 2, "Rounds open at once."),
    _option("--min-round-interval-ms", cs.milliseconds(), 0, "Least time between two launches."),
    _option(
        "--sync-interval-steps",
        cs.Real(0),
        24.0,
        "Inner steps between two updates of one fragment; 0 launches without pacing.",
    ),
    _option(
        "--delta-correction",
        click.Choice(["heloco", "none"]),
        "heloco",
        "Turn outer gradients towards the momentum, or leave them.",
    ),
    _option("--quorum-timeout-s", cs.whole_seconds(), 900, "Longest wait for a quorum."),
    _option(
        "--final-ack-timeout-s",
        cs.whole_seconds(),
        None,
        "Longest wait for all acknowledgements.  [default: the quorum timeout]",
    ),
    _option("--total-steps", cs.Whole(1, cs.I64_MAX), None, "Rounds to run, else until a signal."),
    _option("--outer-lr", _RATE, 0.7, "Outer learning rate."),
    _option("--outer-momentum", _MOMENTUM, 0.9, "Nesterov momentum of the outer step."),
    _option("--outer-lr-by-fragment", cs.Commas(_RATE), None, "One outer learning rate each."),
    _option(
        "--learner-weight",
        click.Choice(["tokens2-over-steps", "equal"]),
        "tokens2-over-steps",
        "How much each answer counts.",
    ),
    _option("--max-base-lag", cs.Whole(0, U64_MAX), None, "Oldest base admitted, in versions."),
    _option("--iso-backend", click.Choice(list(BACKENDS)), "scalar", "Who flattens iso matrices."),
    _option(
        "--iso-rank-cutoff",
        cs.Real(0, 1, open_high=True),
        None,
        "Relative cut-off of singular values.  [default: max(rows, cols) * 2^-23]",
    ),
    _option(
        "--iso-worker-python", _PATH, None, "Interpreter of the SVD workers.  [default: this one]"
    ),
    _option(
        "--iso-worker-devices",
        cs.Commas(click.STRING, distinct=True),
        "cpu",
        "Devices of the SVD workers, one process each.",
    ),
    _option(
        "--iso-worker-queue-capacity", cs.Whole(1, cs.I64_MAX), 16, "SVD jobs admitted at once."
    ),
    _option("--checkpoint-path", _PATH, "yeto-state.ckpt", "Where the state is kept."),
    _option(
        "--checkpoint-every",
        cs.Whole(0, U64_MAX),
        8,
        "Rounds between checkpoints; 0 writes only the final one.",
    ),
    _flag("--resume", "Go on from the checkpoint, which must exist."),
    _flag("--mark-final-checkpoint", "Declare the checkpoint final when all acknowledged."),
    _option("--final-state", _PATH, None, "Also write the final parameters here."),
    _option("--event-tape", _PATH, None, "JSON Lines of every round."),
    _option(
        "--learner-budget-steps",
        cs.Whole(1, cs.U32_MAX),
        None,
        "Cutoff process of a budget benchmark: optimizer steps that each learner reports.",
    ),
    _flag("--require-profile-binding", "Refuse learners that name no profile."),
    _flag("--print-profile", "Print the profile hash of this command line and exit."),
    _option("--handshake-timeout-s", cs.seconds(), 10.0, "Time for the first frame of a socket."),
    _option("--heartbeat-timeout-s", cs.seconds(), 60.0, "Silence of a learner that sent one."),
    _option("--stall-timeout-s", cs.seconds(), 60.0, "Longest time without progress of output."),
    _option("--max-connections", cs.Whole(1, cs.I64_MAX), 4096, "Sockets at once."),
    click.option(
        "--auth-key-file",
        type=_PATH,
        multiple=True,
        metavar="FILE",
        help="Only learners with this key may join; may be repeated.  [env: YETO_AUTH_KEY_FILE]",
    ),
    _option("--tls-cert", _PATH, None, "Certificate of this syncer, PEM: speak TLS only."),
    _option("--tls-key", _PATH, None, "Private key of --tls-cert, PEM."),
    _option("--tls-client-ca", _PATH, None, "Learners must show a certificate of this CA, PEM."),
    _flag("--insecure", "Listen on other addresses than loopback without key and client CA."),
)


def syncer_options(function: F) -> F:
    """Adds every option of `yeto-syncer` to a click command."""
    decorators = (*OPTIONS, cs.config_option("syncer"), cs.logging_options, cs.version_option())
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def resolve(values: Mapping[str, Any], context: click.Context) -> SyncerOptions:
    """Fill in dependent defaults and check what single ranges can't (cli.md, C4, C70).

    Args:
        values: the parameters of the click command.
        context: tells which options were given, on the command line or in the file.

    Raises:
        click.UsageError: the message names the flags, and what would be legal.
    """

    def given(name: str) -> bool:
        return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)

    names = {field.name for field in fields(SyncerOptions)}
    merged = {name: value for name, value in values.items() if name in names}
    quorum = merged["quorum"]
    if merged["learners"] is None:
        merged["learners"] = max(DEFAULT_IDS, quorum)
    if merged["final_ack_timeout_s"] is None:
        merged["final_ack_timeout_s"] = merged["quorum_timeout_s"]
    options = SyncerOptions(**merged, warnings=_without_effect(merged, given))
    if quorum > options.learners:
        raise _bad("--quorum", quorum, f"an integer from 1 to {options.learners} (--learners)")
    _check_single_precision(options)
    _check_budget(options, given)
    _check_paths(options)
    return options


def _bad(flag: str, value: object, wanted: str) -> click.UsageError:
    return click.BadParameter(f"{str(value)!r}: {flag} must be {wanted}", param_hint=f"'{flag}'")


def _check_single_precision(options: SyncerOptions) -> None:
    """The outer step rounds these to f32 first (N18); the range must hold for what it uses."""
    for flag, rates in (
        ("--outer-lr", (options.outer_lr,)),
        ("--outer-lr-by-fragment", options.outer_lr_by_fragment or ()),
    ):
        for rate in rates:
            if not 0 < _as_f32(rate) < float("inf"):
                raise _bad(flag, rate, "> 0 and at most 3.4e38, also after rounding to f32")
    if not _as_f32(options.outer_momentum) < 1:
        raise _bad(
            "--outer-momentum", options.outer_momentum, ">= 0 and < 1, also after rounding to f32"
        )


def _as_f32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf")


def _check_budget(options: SyncerOptions, given: Callable[[str], bool]) -> None:
    """C70: what the cutoff process needs and excludes."""
    if options.learner_budget_steps is None:
        return
    if not given("learners"):
        raise click.UsageError(
            "--learner-budget-steps needs --learners M: the run ends when each id reported"
        )
    for flag, is_set in (
        ("--resume", options.resume),
        ("--mark-final-checkpoint", options.mark_final_checkpoint),
    ):
        if is_set:
            raise click.UsageError(f"--learner-budget-steps excludes {flag}: leave one of them out")


def _check_paths(options: SyncerOptions) -> None:
    """No two files of this run may have one name (checkpoint.md, first lines)."""
    taken: dict[str, str] = {}
    inputs = (
        *(("--auth-key-file", path) for path in options.auth_key_file),
        ("--tls-cert", options.tls_cert),
        ("--tls-key", options.tls_key),
        ("--tls-client-ca", options.tls_client_ca),
    )
    for flag, path in (
        ("--checkpoint-path", options.checkpoint_path),
        ("--final-state", options.final_state),
        ("--event-tape", options.event_tape),
        ("--ready-file", options.ready_file),
        ("--iso-worker-python", options.iso_worker_python),
        *inputs,
    ):
        if path is not None and not path:
            raise _bad(flag, path, "a file name")
        if path is not None and "\0" in path:
            raise _bad(flag, path, "a file name without NUL")
    for suffix in CHECKPOINT_SUFFIXES:
        for name in _canonical(str(Path(options.checkpoint_path)) + suffix):
            taken[name] = f"--checkpoint-path ({options.checkpoint_path}{suffix})"
    for flag, path, suffixes in (
        ("--final-state", options.final_state, ("", ".tmp")),
        ("--event-tape", options.event_tape, ("",)),
        ("--ready-file", options.ready_file, ("", ".tmp")),
        ("--config", options.config, ("",)),
    ):
        if path is not None:
            taken.update(dict.fromkeys(_free_names(flag, path, suffixes, taken), flag))
    for flag, path in inputs:  # they are only read: one file may serve several of them
        if path is not None:
            _free_names(flag, path, ("",), taken)


def _free_names(
    flag: str, path: str, suffixes: tuple[str, ...], taken: Mapping[str, str]
) -> set[str]:
    names = {name for suffix in suffixes for name in _canonical(path + suffix)}
    clash = next((name for name in names if name in taken), None)
    if clash is not None:
        raise click.UsageError(
            f"{flag} {path!r} collides with {taken[clash]}: give it another name"
        )
    return names


def _canonical(path: str) -> set[str]:
    """The names under which `path` could be met: as a directory entry, and where it leads."""
    directory, name = os.path.split(os.path.abspath(path))
    return {os.path.join(os.path.realpath(directory), name), os.path.realpath(path)}


def _without_effect(values: Mapping[str, Any], given: Callable[[str], bool]) -> tuple[str, ...]:
    """One sentence for each given option that does nothing in the chosen mode."""
    found = []
    if values["iso_backend"] == "scalar":
        for name in ("iso_worker_python", "iso_worker_devices", "iso_worker_queue_capacity"):
            if given(name):
                found.append(f"{_flag_of(name)} has no effect with --iso-backend scalar")
    if values["outer_lr_by_fragment"] is not None and given("outer_lr"):
        found.append("--outer-lr has no effect beside --outer-lr-by-fragment")
    if values["learner_budget_steps"] is not None:
        for name in ("final_state", "final_ack_timeout_s"):
            if given(name):
                found.append(f"{_flag_of(name)} has no effect with --learner-budget-steps")
    return tuple(found)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Deadlines of the SVD pool, whole seconds (N31)."""

    startup: int
    request: int
    drain: int


def worker_timeouts(environment: Mapping[str, str]) -> WorkerTimeouts:
    """Read YETO_ISO_WORKER_{STARTUP,REQUEST,DRAIN}_TIMEOUT_S.

    Raises:
        click.UsageError: naming the variable, its value and the range.
    """
    found = []
    for word, default in WORKER_TIMEOUTS.items():
        name = f"YETO_ISO_WORKER_{word}_TIMEOUT_S"
        text = environment.get(name)
        if text is None:
            found.append(default)
        elif _DIGITS.fullmatch(text) and 0 < int(text) <= cs.MAX_DURATION_S:
            found.append(int(text))
        else:
            raise click.UsageError(
                f"{name} is {text[:80]!r}: it must be an integer from 1 to {cs.MAX_DURATION_S}"
            )
    return WorkerTimeouts(*found)
