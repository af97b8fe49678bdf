"""What the wire dtype of the pushes costs in held-out loss, with and without error feedback.

`python -m benchmarks.quality [--quick] [--json FILE] [--seeds N ...]`. Every arm trains the
built-in task with two learners through a real syncer, in blocking mode with the same seeds, so that
all arms take the same optimizer steps on the same batches and merge at the same steps; they differ
in the wire dtype and in error feedback (L29) alone.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from benchmarks.demo.programs import Line, Programs
from benchmarks.report import Report, benchmark_parser
from benchmarks.task import task_flags

SYNCER = "syncer"
REFERENCE = "f32"
TICK_S = 0.1
WANTED = {"q4_feedback": 1.01}
"""Largest ratio to the loss of the f32 arm that is good enough."""


class RunFailed(Exception):
    """A run did not end as it must; the text says what happened."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to push: the session dtype, and whether what it rounds away is carried over."""

    name: str
    dtype: str
    feedback: bool


ARMS = (
    Arm(REFERENCE, "f32", False),
    Arm("q4_feedback", "q4", True),
    Arm("q4_plain", "q4", False),
    Arm("bf16_feedback", "bf16", True),
    Arm("bf16_plain", "bf16", False),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large each run is.

    Attributes:
        learners: M, and the quorum.
        rounds: merges of every fragment.
        every: H, optimizer steps of each learner between two merges of a fragment.
        fragments: there must be exactly so many (L9).
        layers, width, heads: of the built-in model.
        seq_len: tokens of a sequence.
        batch_size: sequences of one optimizer step of one learner.
        lr: inner learning rate.
        timeout_s: bound of one run, and the syncer's quorum timeout.
    """

    learners: int = 2
    rounds: int = 30
    every: int = 20
    fragments: int = 4
    layers: int = 2
    width: int = 64
    heads: int = 4
    seq_len: int = 64
    batch_size: int = 8
    lr: float = 1e-3
    timeout_s: int = 300

    @property
    def steps(self) -> int:
        """Optimizer steps of one learner."""
        return self.rounds * self.every

    @property
    def outer_steps(self) -> int:
        """Rounds of the syncer, over all fragments."""
        return self.rounds * self.fragments


QUICK = Sizes(rounds=10, every=10, layers=1, width=32, heads=2)


@dataclass(frozen=True, slots=True)
class Losses:
    """Held-out loss in nats per byte: of the initial model, and of the final merged one."""

    initial: float
    final: float


# -- command lines and results; pure -------------------------------------------------------------


def syncer_flags(sizes: Sizes, folder: Path) -> list[str]:
    """Waits for everyone in every round: nothing depends on who is faster."""
    return [
        "--port=0",
        f"--ready-file={folder / 'ready.json'}",
        f"--checkpoint-path={folder / 'state.ckpt'}",
        "--checkpoint-every=0",
        f"--learners={sizes.learners}",
        f"--quorum={sizes.learners}",
        "--sync-interval-steps=0",
        f"--total-steps={sizes.outer_steps}",
        f"--quorum-timeout-s={sizes.timeout_s}",
    ]


def learner_flags(arm: Arm, sizes: Sizes, *, seed: int, learner: int, port: int) -> list[str]:
    """One learner of a run; α = 0: after every merge it goes on from the broadcast alone."""
    return [
        f"--connect=127.0.0.1:{port}",
        f"--learner-id={learner}",
        f"--sync-every={sizes.every}",
        "--merge-alpha=0",
        f"--wire-dtype={arm.dtype}",
        f"--error-feedback={'on' if arm.feedback else 'off'}",
        f"--seed={seed}",
        *task_flags(sizes),
        f"--eval-every-steps={10 * sizes.steps}",
    ]


@dataclass
class Record:
    """What the programs of one run have said so far."""

    evaluations: list[Line] = field(default_factory=list)
    finals: dict[str, Line] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """Take one line of any program."""
        self.last[line.program] = line.message
        if line.event == "evaluation":
            self.evaluations.append(line)
        elif line.event == "final":
            self.finals[line.program] = line

    def losses(self, sizes: Sizes) -> Losses:
        """What a finished run amounts to.

        Raises:
            RunFailed: the learners do not hold one and the same model of the last round after
                exactly the planned steps, so that the run cannot be compared with others.
        """
        initial = {
            float(line.fields["held_out_loss"])
            for line in self.evaluations
            if line.fields["local_step"] == 0
        }
        finals = [line.fields for line in self.finals.values()]
        final = {float(fields["held_out_loss"]) for fields in finals}
        if len(finals) != sizes.learners or len(final) != 1 or len(initial) != 1:
            raise RunFailed(f"{len(finals)} learners ended with the losses {sorted(final)}")
        wanted = (sizes.steps, sizes.outer_steps)
        if found := {(f["local_step"], f["step"]) for f in finals} - {wanted}:
            raise RunFailed(f"ended at steps (own, outer) {sorted(found)}, wanted {wanted}")
        losses = Losses(*initial, *final)
        if not (math.isfinite(losses.initial) and math.isfinite(losses.final)):
            raise RunFailed(f"the losses are {losses}")
        return losses


def rows(
    losses: Mapping[str, Sequence[Losses]], sizes: Sizes
) -> Iterator[tuple[str, float, str, str]]:
    """Metric, value, unit, note: the mean loss of each arm, then its ratio to the f32 arm.

    Args:
        losses: by arm, one per seed, in the same order of seeds.
        sizes: of every run.
    """
    means = {name: statistics.fmean(run.final for run in runs) for name, runs in losses.items()}
    reference = losses[REFERENCE]
    initial = statistics.fmean(run.initial for run in reference)
    yield "quality_loss_initial", initial, "nats/byte", f"mean of {len(reference)} seed(s)"
    for name, mean in means.items():
        note = f"{sizes.steps} steps of {sizes.learners} learners, {sizes.rounds} merges"
        yield f"quality_loss_{name}", mean, "nats/byte", note
    for name, mean in means.items():
        if name != REFERENCE:
            ratios = [
                run.final / base.final for run, base in zip(losses[name], reference, strict=True)
            ]
            spread = f"seeds {min(ratios):.4f} to {max(ratios):.4f}"
            wanted = f", wanted <= {WANTED[name]}" if name in WANTED else ""
            yield f"{name}_vs_f32", mean / means[REFERENCE], "x", spread + wanted


# -- processes -----------------------------------------------------------------------------------


def train(arm: Arm, sizes: Sizes, seed: int, folder: Path) -> Losses:
    """One run in a folder of its own, which must exist and be empty.

    Raises:
        RunFailed: a program failed, it took too long, or `Record.losses` found fault.
    """
    deadline = time.monotonic() + sizes.timeout_s
    ready = folder / "ready.json"
    record = Record()
    names = [f"learner-{number}" for number in range(sizes.learners)]
    with Programs(folder) as programs:
        programs.start(SYNCER, "yeto-syncer", *syncer_flags(sizes, folder))
        while not ready.exists():
            _follow(programs, record, [SYNCER], deadline)
        port = int(json.loads(ready.read_text())["port"])
        for number, name in enumerate(names):
            flags = learner_flags(arm, sizes, seed=seed, learner=number, port=port)
            programs.start(name, "yeto-learner", *flags)
        running = [SYNCER, *names]
        while running:
            running = _follow(programs, record, running, deadline)
        for line in programs.lines(0):
            record.add(line)
    return record.losses(sizes)


def _follow(
    programs: Programs, record: Record, running: Sequence[str], deadline: float
) -> list[str]:
    """Take the lines that have come; returns those of `running` that have not ended."""
    for line in programs.lines(TICK_S):
        record.add(line)
    codes = {name: programs.exit_code(name) for name in running}
    for name, code in codes.items():
        if code:
            raise RunFailed(f"{name} ended with {code}: {record.last.get(name, 'no word')}")
    if time.monotonic() > deadline:
        raise RunFailed(f"{', '.join(running)} did not end in time: {record.last}")
    return [name for name, code in codes.items() if code is None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="default: 0")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    losses: dict[str, list[Losses]] = {}
    try:
        for arm in ARMS:
            for seed in options.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    run = train(arm, sizes, seed, Path(folder))
                losses.setdefault(arm.name, []).append(run)
                print(f"{arm.name}, seed {seed}: {run.final:.4f} nats per byte", flush=True)
    except RunFailed as error:
        print(f"quality: {arm.name}, seed {seed}: {error}", file=sys.stderr)
        return 1
    report = Report("Quality: held-out loss of the final merged model")
    for row in rows(losses, sizes):
        report.add(*row)
    report.finish(options.json)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the benchmark as Ctrl-C does: no program of it is left running."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
