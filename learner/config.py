"""Settings of one learner; names and ranges are those of `yeto-learner` (cli.md section 2)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from learner.errors import ConfigError
from wire.dtypes import DType
from wire.identity import HASH_BYTES

BASELINE = "none"
"""`connect` value that turns all synchronisation off (L70)."""
MAX_DURATION_S = 31_536_000.0
_U32_MAX = 2**32 - 1
_DTYPES = {dtype.label: dtype for dtype in DType}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the syncer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read HOST:PORT, split at the last colon; an IPv6 host stands in brackets.

    Raises:
        ConfigError: what is wrong with `text`.
    """
    host, colon, digits = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_number = digits.isascii() and digits.isdigit()
    if not colon or not host or set(host) & set("[]") or not is_number:
        raise ConfigError(f"connect {text!r} is not HOST:PORT, [IPv6]:PORT or {BASELINE!r}")
    if not 1 <= int(digits) <= 65535:
        raise ConfigError(f"connect {text!r}: port {digits} is not in 1..65535")
    return Address(host, int(digits))


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Everything a `Learner` needs beside the model. Checked when built.

    Attributes:
        connect: HOST:PORT of the syncer, or `none` for a baseline without synchronisation.
        learner_id: id in the run; 0 initializes it.
        fragments: requested number of fragments P (L5-L9).
        fragment_pattern: `binpack` or `strided`.
        matrix_merge: `rda` or `iso`.
        avg_regex: names that match (search) join the averaged fragment (L5).
        alpha: local share in the blend, 0 <= alpha < 1 (L26).
        wire_dtype: `f32`, `bf16` or `q4`.
        streams: data sockets beside the control socket.
        error_feedback: carry what the wire dtype rounds away (L29); f32 has nothing to carry.
        run_id: name of the experiment; part of the session contract (W21).
        profile: 64 hex digits that bind to a syncer profile, or None.
        max_local_steps: safety stop; in a baseline, where `StepInfo.stop` turns true.
        learner_budget_steps: exact steps of a budget run (L40).
        sync_every: blocking mode: at every H-th step the loop waits until each fragment is pulled,
            merged and applied; with alpha 0 and a quorum of all that is classic DiLoCo.
        output_dir: where `layout.json` and the final artifact go.
        state_dir: durable local state (L50); used at start when present.
        state_every_steps: optimizer steps between two saves.
        connect_timeout_s: seconds to reach the syncer for the first time.
        final_timeout_s: bound of the finalization and budget waits (L11).
        auth_key_file: shared key that seals HELLO (S5); None: what YETO_AUTH_KEY_FILE names, if
            anything.
        tls_ca: PEM of the CA that signed the syncer's certificate; turns TLS on (S11).
        tls_cert, tls_key: PEM of the certificate to show, and of its private key.
        tls_server_name: name in the syncer's certificate; None: the host of `connect`.
        insecure: send the model to another machine without key and TLS all the same (S21).
    """

    connect: str
    learner_id: int = 0
    fragments: int = 8
    fragment_pattern: str = "binpack"
    matrix_merge: str = "rda"
    avg_regex: str | None = None
    alpha: float = 0.5
    wire_dtype: str = "bf16"
    streams: int = 4
    error_feedback: bool = True
    run_id: str | None = None
    profile: str | None = None
    max_local_steps: int | None = None
    learner_budget_steps: int | None = None
    sync_every: int | None = None
    output_dir: Path | str | None = None
    state_dir: Path | str | None = None
    state_every_steps: int = 100
    connect_timeout_s: float = 900.0
    final_timeout_s: float = 900.0
    auth_key_file: Path | str | None = None
    tls_ca: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    tls_server_name: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.connect != BASELINE:
            parse_address(self.connect)
        _within("learner_id", self.learner_id, 0, _U32_MAX)
        _within("fragments", self.fragments, 1, None)
        _one_of("fragment_pattern", self.fragment_pattern, ("binpack", "strided"))
        _one_of("matrix_merge", self.matrix_merge, ("rda", "iso"))
        _one_of("wire_dtype", self.wire_dtype, tuple(_DTYPES))
        _within("streams", self.streams, 0, 256)
        _within("state_every_steps", self.state_every_steps, 1, None)
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"alpha {self.alpha!r} is not in 0 <= alpha < 1")
        for name in ("connect_timeout_s", "final_timeout_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and 0 < seconds <= MAX_DURATION_S):
                raise ConfigError(f"{name} {seconds!r} is not in 0 < s <= {MAX_DURATION_S:.0f}")
        self._check_texts()
        self._check_budget()

    def _check_texts(self) -> None:
        if self.run_id is not None and not 1 <= len(self.run_id.encode()) <= 1024:
            raise ConfigError("run_id must be 1 to 1024 bytes of UTF-8")
        if self.profile is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.profile):
            raise ConfigError(f"profile {self.profile!r} is not {2 * HASH_BYTES} hex digits")
        if self.avg_regex is not None:
            try:
                re.compile(self.avg_regex)
            except re.error as error:
                raise ConfigError(f"avg_regex {self.avg_regex!r}: {error}") from error

    def _check_budget(self) -> None:
        if self.max_local_steps is not None:
            _within("max_local_steps", self.max_local_steps, 1, None)
        if self.sync_every is not None:
            _within("sync_every", self.sync_every, 1, None)
            if self.learner_budget_steps is not None:
                raise ConfigError("sync_every cannot be combined with learner_budget_steps")
        if self.learner_budget_steps is None:
            return
        _within("learner_budget_steps", self.learner_budget_steps, 1, _U32_MAX)
        if self.max_local_steps not in (None, self.learner_budget_steps):
            raise ConfigError(
                f"max_local_steps {self.max_local_steps} must equal learner_budget_steps "
                f"{self.learner_budget_steps} when both are given"
            )
        if self.connect == BASELINE:
            raise ConfigError(f"learner_budget_steps needs a syncer, connect is {BASELINE!r}")

    @property
    def address(self) -> Address | None:
        """The syncer, or None in a baseline."""
        return None if self.connect == BASELINE else parse_address(self.connect)

    @property
    def dtype(self) -> DType:
        """Session dtype."""
        return _DTYPES[self.wire_dtype]

    @property
    def profile_hash(self) -> bytes | None:
        """The 32 bytes that HELLO carries, if any."""
        return None if self.profile is None else bytes.fromhex(self.profile)


def _within(name: str, value: int, least: int, most: int | None) -> None:
    # A bool is an int to Python, but no number a person would mean here.
    right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not right or (most is not None and value > most):
        span = f">= {least}" if most is None else f"in {least}..{most}"
        raise ConfigError(f"{name} {value!r} is not {span}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is not one of {', '.join(known)}")
