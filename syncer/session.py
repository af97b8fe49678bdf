"""What all HELLOs of a run must agree on: W12 steps 10 to 13, W18."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from checkpoint.snapshot import Snapshot
from syncer.config import CoordinatorConfig
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.layout import NumericLayout
from wire.messages import Hello


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The session that the first accepted HELLO fixed (W18)."""

    dtype: DType
    layout: NumericLayout
    fingerprint: bytes
    contract: bytes
    profile: bytes | None

    @classmethod
    def of(cls, hello: Hello) -> SessionFacts:
        """The session this HELLO asks for."""
        return cls(hello.dtype, hello.layout, hello.fingerprint, hello.contract, hello.profile)

    @property
    def numels(self) -> list[int]:
        """Elements per fragment."""
        return [fragment.numel for fragment in self.layout.fragments]


class CheckpointGate(Protocol):
    """What a checkpoint demands of every HELLO of the run that goes on from it."""

    def check(self, hello: Hello) -> None:
        """Raises ProtocolError `checkpoint-mismatch` (K18)."""
        ...


class ResumeSource(Protocol):
    """A checkpoint that passed K16 and waits for the HELLO that fixes the session (K17)."""

    @property
    def global_step(self) -> int:
        """Step of the file."""
        ...

    @property
    def ledger_ids(self) -> Collection[int]:
        """Learner ids that the file's ledger names."""
        ...

    @property
    def gate(self) -> CheckpointGate:
        """Its demands, without its values."""
        ...

    def snapshot_for(self, hello: Hello) -> Snapshot:
        """The state to install; raises ProtocolError `checkpoint-mismatch` (K18)."""
        ...


def admit(
    hello: Hello,
    config: CoordinatorConfig,
    session: SessionFacts | None,
    gate: CheckpointGate | None,
) -> None:
    """Apply W12 steps 10 to 13, in their order.

    Args:
        session: the fixed session, None before the first accepted HELLO.
        gate: of the checkpoint that the run goes on from, None in a fresh run.

    Raises:
        ProtocolError: with the code of the first failing step.
    """
    check_configuration(hello, config)
    if gate is not None:
        gate.check(hello)
    if session is not None:
        check_session(hello, session)


def check_configuration(hello: Hello, config: CoordinatorConfig) -> None:
    """W12 steps 10 and 11.

    Raises:
        ProtocolError: `profile-mismatch`, `profile-required` or `fragment-count`.
    """
    if hello.profile is None:
        if config.require_profile:
            raise ProtocolError(
                ErrorCode.PROFILE_REQUIRED,
                "this syncer only takes learners bound to its profile, "
                f"{config.profile.hex()[:16]}…: start the learner with --profile",
            )
    elif hello.profile != config.profile:
        raise ProtocolError(
            ErrorCode.PROFILE_MISMATCH,
            _differs("profile", hello.profile.hex(), config.profile.hex(), "the syncer's")
            + "; a seal sent to a syncer that has no key reads as a profile too",
        )
    rates = config.outer_lr_by_fragment
    if rates is not None and len(rates) != len(hello.layout):
        raise ProtocolError(
            ErrorCode.FRAGMENT_COUNT,
            f"the layout has {len(hello.layout)} fragments, "
            f"--outer-lr-by-fragment lists {len(rates)} rates",
        )


def check_session(hello: Hello, session: SessionFacts) -> None:
    """W12 step 13; the text names every field that differs, the fingerprint among them (P10).

    Raises:
        ProtocolError: `session-mismatch`.
    """
    wanted = SessionFacts.of(hello)
    if wanted == session:
        return
    pairs = [
        ("fingerprint", wanted.fingerprint.hex(), session.fingerprint.hex()),
        ("contract", wanted.contract.hex(), session.contract.hex()),
        ("dtype", wanted.dtype.label, session.dtype.label),
        ("profile", _hex_or_none(wanted.profile), _hex_or_none(session.profile)),
    ]
    if wanted.layout != session.layout:
        pairs.append(("layout", _layout_digest(wanted), _layout_digest(session)))
    sentences = [
        _differs(name, theirs, ours, "the session's")
        for name, theirs, ours in pairs
        if theirs != ours
    ]
    raise ProtocolError(ErrorCode.SESSION_MISMATCH, "; ".join(sentences))


def _differs(name: str, theirs: str, ours: str, whose: str) -> str:
    return f"{name} {theirs[:16]} differs from {whose} {ours[:16]}"


def _hex_or_none(value: bytes | None) -> str:
    return "absent" if value is None else value.hex()


def _layout_digest(facts: SessionFacts) -> str:
    """A short name for a numeric layout, which has no hash of its own on the wire."""
    return hashlib.sha256(facts.layout.encode()).hexdigest()
