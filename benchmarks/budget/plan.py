"""What is run: sizes, arms, cases, and the command lines of both syncer processes; no I/O.

One case is one arm with one seed. Its cutoff process and its consolidation process differ exactly
as the protocol says (C70 to C76); what an arm changes goes to both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from benchmarks.task import task_flags
from wire.identity import session_contract_hash


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large each run is.

    Attributes:
        steps: optimizer steps of every learner, its budget.
        fragments: requested fragments; how many there are is the learner's to say (L9).
        layers, width, heads: of the built-in model.
        seq_len: tokens of a sequence.
        batch_size: sequences of one optimizer step of one learner.
        lr: inner learning rate.
        sync_interval_steps: pacing H of the cutoff process, unless the arm sets it.
        timeout_s: quorum timeout (and lease) of both syncers, and the bound of each phase.
    """

    steps: int = 600
    fragments: int = 4
    layers: int = 2
    width: int = 64
    heads: int = 4
    seq_len: int = 64
    batch_size: int = 8
    lr: float = 1e-3
    sync_interval_steps: float = 24.0
    timeout_s: int = 300

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step of one learner."""
        return self.batch_size * self.seq_len

    @property
    def tokens(self) -> int:
        """The token budget of one learner, its exact unit count."""
        return self.steps * self.step_tokens


QUICK = Sizes(steps=600, fragments=3, layers=1, width=32, heads=2, seq_len=32, batch_size=4)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run it.

    Attributes:
        name: as the command line and the report call it.
        learners: M.
        meaning: one line for the report.
        syncer: flags of both syncer processes.
        learner: flags of every learner.
        dtype: session dtype.
        heloco, outer_lr, outer_momentum: how the syncer merges; also what the proof replays.
        sync_interval_steps: H of the cutoff process, None for `Sizes`.
    """

    name: str
    learners: int
    meaning: str
    syncer: tuple[str, ...] = ()
    learner: tuple[str, ...] = ()
    dtype: str = "bf16"
    heloco: bool = True
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    sync_interval_steps: float | None = None


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("m2", 2, "two learners, all defaults"),
        Arm("m4", 4, "four learners, all defaults"),
        Arm("q4", 2, "deltas of 4 bits", dtype="q4"),
        Arm("alpha0", 2, "a broadcast replaces the local values", learner=("--merge-alpha=0",)),
        Arm("serial", 2, "one open round at a time", syncer=("--pipeline=1",)),
        Arm("noheloco", 2, "no directional correction", heloco=False),
        Arm("strided", 2, "fragments by layer", learner=("--fragment-pattern=strided",)),
        Arm("iso", 2, "matrices merged by spectrum", learner=("--matrix-merge=iso",)),
        Arm(
            "direct-rda",
            2,
            "the radial mean is applied as it is: no correction, no momentum, rate 1",
            heloco=False,
            outer_lr=1.0,
            outer_momentum=0.0,
        ),
        Arm("unthrottled", 2, "rounds follow each other unpaced", sync_interval_steps=0.0),
    )
}


class Case(NamedTuple):
    """One arm with one seed, or (`arm` None) the baseline of M learners' data."""

    arm: Arm | None
    learners: int
    seed: int

    @property
    def key(self) -> str:
        """Names the record."""
        return f"{self.name}/seed{self.seed}"

    @property
    def name(self) -> str:
        """The arm, or `baseline-mM`."""
        return baseline_name(self.learners) if self.arm is None else self.arm.name


def baseline_name(learners: int) -> str:
    """What the report calls the baseline of M learners' data."""
    return f"baseline-m{learners}"


def plan(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Case]:
    """All cases in order: per seed the baselines that its arms need, then the arms."""
    counts = sorted({arm.learners for arm in arms})
    return [
        case
        for seed in seeds
        for case in (
            *(Case(None, learners, seed) for learners in counts),
            *(Case(arm, arm.learners, seed) for arm in arms),
        )
    ]


def identity(sizes: Sizes, data_sha256: str) -> str:
    """What two records must share to belong in one report: hex SHA-256.

    Seeds and arms are not in it: more of them may be added to a report later.
    """
    document = {"format": "yeto-budget-v1", "sizes": asdict(sizes), "data": data_sha256}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Paths:
    """Files of one case, as text for command lines."""

    checkpoint: str
    tape: str
    ready: str


def _common_flags(arm: Arm, sizes: Sizes, paths: Paths, port: int) -> list[str]:
    return [
        f"--port={port}",
        f"--ready-file={paths.ready}",
        f"--checkpoint-path={paths.checkpoint}",
        f"--event-tape={paths.tape}",
        f"--learners={arm.learners}",
        f"--outer-lr={arm.outer_lr}",
        f"--outer-momentum={arm.outer_momentum}",
        f"--delta-correction={'heloco' if arm.heloco else 'none'}",
        f"--quorum-timeout-s={sizes.timeout_s}",
        *arm.syncer,
    ]


def cutoff_flags(arm: Arm, sizes: Sizes, paths: Paths) -> list[str]:
    """The first process: any free port, budget mode (C70)."""
    interval = arm.sync_interval_steps
    return [
        *_common_flags(arm, sizes, paths, 0),
        f"--quorum={arm.learners // 2 + 1}",
        f"--sync-interval-steps={sizes.sync_interval_steps if interval is None else interval}",
        f"--learner-budget-steps={sizes.steps}",
    ]


def consolidation_flags(
    arm: Arm, sizes: Sizes, paths: Paths, *, port: int, cutoff: int, fragments: int
) -> list[str]:
    """The second process: the same endpoint, F rounds beyond C, quorum of all (C76)."""
    return [
        *_common_flags(arm, sizes, paths, port),
        f"--quorum={arm.learners}",
        "--sync-interval-steps=0",
        f"--total-steps={cutoff + fragments}",
        "--resume",
        "--mark-final-checkpoint",
    ]


def learner_flags(
    arm: Arm,
    sizes: Sizes,
    *,
    seed: int,
    learner: int,
    port: int,
    run_id: str,
    output_dir: str,
    state_dir: str,
    data: str | None,
) -> list[str]:
    """One learner of the case. The saved state is where the proof finds the frozen parameters."""
    return [
        f"--connect=127.0.0.1:{port}",
        f"--learner-id={learner}",
        f"--learner-budget-steps={sizes.steps}",
        f"--seed={seed}",
        f"--run-id={run_id}",
        f"--wire-dtype={arm.dtype}",
        *task_flags(sizes),
        f"--eval-every-steps={10 * sizes.steps}",
        f"--output-dir={output_dir}",
        f"--state-dir={state_dir}",
        f"--state-every-steps={10 * sizes.steps}",
        *arm.learner,
        *([] if data is None else [f"--data={data}"]),
    ]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the files of one case must agree with.

    Attributes:
        learners: M; the ids are 0 to M - 1.
        steps: the budget of each.
        tokens: the exact unit count of each.
        fragments: F of the learners' layout.
        fingerprint: of that layout, 32 bytes.
        contract: session contract, 32 bytes.
    """

    learners: int
    steps: int
    tokens: int
    fragments: int
    fingerprint: bytes
    contract: bytes

    @property
    def ids(self) -> list[int]:
        """Every configured learner, ascending."""
        return list(range(self.learners))


def expected(arm: Arm, sizes: Sizes, fingerprint: bytes, fragments: int, run_id: str) -> Expected:
    """What a case of this arm must show, given the layout that its learners wrote."""
    return Expected(
        learners=arm.learners,
        steps=sizes.steps,
        tokens=sizes.tokens,
        fragments=fragments,
        fingerprint=fingerprint,
        contract=session_contract_hash(fingerprint, run_id),
    )


def choose_arms(names: Iterable[str]) -> list[Arm]:
    """Arms by name, in the given order.

    Raises:
        KeyError: the first name that is no arm.
    """
    return [ARMS[name] for name in names]
