"""What the coordinator core needs to know of the command line (cli.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Options of one syncer run, parsed and range-checked. All durations are seconds.

    Attributes:
        profile: this syncer's semantic profile hash, 32 bytes (W22).
        learners: M; legal ids are 0..M-1.
        quorum: K, 1..M.
        grace_cap: most seconds a grace window lasts (`--grace-ms` / 1000).
        grace_gamma, grace_tau: γ and τ of C17.
        pipeline: rounds in flight as configured; min(this, F) take effect (C10).
        min_round_interval: launch floor (C13).
        sync_interval_steps: H of C13, 0 for no adaptive floor.
        quorum_timeout: deadline of an attempt, budget lease, bound of a stop (C12, C73, C80).
        final_ack_timeout: from the freeze to the last ACK (C65).
        total_steps: T, None to run until a signal.
        checkpoint_every: 0 for only the final checkpoint.
        mark_final: `--mark-final-checkpoint` (C66).
        final_state: whether `--final-state` names a file.
        budget_steps: `--learner-budget-steps`, None when budget mode is off.
        require_profile: `--require-profile-binding` (W12 step 10).
        outer_lr, outer_momentum, outer_lr_by_fragment: N18, N19.
        heloco, equal_weights, iso_backend: numerics.md.
        max_base_lag: staleness limit in versions, None for no limit (C20).
        handshake_timeout: also the silence after which a missing INIT is reported (P3).
        stall_timeout: life of a superseded generation (C19).
    """

    profile: bytes
    learners: int = 256
    quorum: int = 1
    grace_cap: float = 1.0
    grace_gamma: float = 0.8
    grace_tau: float = 2.0
    pipeline: int = 2
    min_round_interval: float = 0.0
    sync_interval_steps: float = 24.0
    quorum_timeout: float = 900.0
    final_ack_timeout: float = 900.0
    total_steps: int | None = None
    checkpoint_every: int = 8
    mark_final: bool = False
    final_state: bool = False
    budget_steps: int | None = None
    require_profile: bool = False
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_lr_by_fragment: tuple[float, ...] | None = None
    heloco: bool = True
    equal_weights: bool = False
    iso_backend: int = 0
    max_base_lag: int | None = None
    handshake_timeout: float = 10.0
    stall_timeout: float = 60.0

    @property
    def barrier_quorum(self) -> int:
        """Distinct ids the start barrier waits for: K, or M in budget mode (C8)."""
        return self.quorum if self.budget_steps is None else self.learners

    def outer_lr_of(self, fragment: int) -> float:
        """Outer learning rate of one fragment (N19)."""
        rates = self.outer_lr_by_fragment
        return self.outer_lr if rates is None else rates[fragment]
