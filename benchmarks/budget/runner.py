"""One case from the first process to its record: the two syncers, the learners, the checks.

Whatever goes wrong ends in a record that failed, with the reason; only then the next case runs.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.budget import files
from benchmarks.budget.baseline import (
    check_baseline,
    check_loss,
    evaluate_export,
    settings,
    train_together,
)
from benchmarks.budget.checks import (
    CheckpointFacts,
    check_artifacts,
    check_consolidation,
    check_cutoff,
)
from benchmarks.budget.files import CaseFailed
from benchmarks.budget.plan import (
    Arm,
    Case,
    Expected,
    Paths,
    Sizes,
    consolidation_flags,
    cutoff_flags,
    expected,
    learner_flags,
)
from benchmarks.budget.replay import check_frozen, check_replay, compare, replay
from benchmarks.budget.results import Record
from benchmarks.demo.programs import Programs
from learner.tasks.bytes_lm import BytesLM
from syncer.tape import TapeRecord, read_tape
from wire.layout import NamedLayout

TICK_S = 0.1
CUTOFF, CONSOLIDATION = "cutoff", "consolidation"
CONNECTED = "connected to the syncer"
WRITTEN = "learner-budget cutoff checkpoint written"
ACKNOWLEDGED = "all learners acknowledged final cut"

Say = Callable[[str], None]


@dataclass(slots=True)
class Found:
    """What is known of a case so far; becomes its record."""

    violations: list[str]
    initial_loss: float | None = None
    held_out_loss: float | None = None
    cutoff_step: int | None = None
    fragments: int | None = None
    replay_difference: float | None = None
    bits_equal: bool | None = None


class Runner:
    """Runs cases below one folder.

    Args:
        folder: each case gets a folder of its own there.
        sizes: of every case.
        data: text to train on, None for the built-in.
        identity: of the configuration, for the records.
        say: shows one line of progress.
    """

    def __init__(
        self, folder: Path, sizes: Sizes, data: Path | None, identity: str, say: Say
    ) -> None:
        self._folder = folder
        self._sizes = sizes
        self._data = data
        self._identity = identity
        self._say = say

    def run(self, case: Case) -> Record:
        """Run one case; never raises for anything that went wrong in it."""
        found = Found([])
        started = time.monotonic()
        try:
            if case.arm is None:
                self._baseline(case, found)
            else:
                self._arm_run(case.arm, case.seed).run(found)
        except Exception as error:  # a fault of a case is its result, and others can still run
            found.violations.append(f"{type(error).__name__}: {error}")
        return Record(
            key=case.key,
            name=case.name,
            learners=case.learners,
            seed=case.seed,
            identity=self._identity,
            passed=not found.violations,
            violations=tuple(found.violations),
            tokens=case.learners * self._sizes.tokens,
            wall_s=round(time.monotonic() - started, 3),
            initial_loss=found.initial_loss,
            held_out_loss=found.held_out_loss,
            cutoff_step=found.cutoff_step,
            fragments=found.fragments,
            replay_difference=found.replay_difference,
            bits_equal=found.bits_equal,
        )

    def _arm_run(self, arm: Arm, seed: int) -> ArmRun:
        folder = self._folder / arm.name / f"seed{seed}"
        return ArmRun(arm, seed, folder, sizes=self._sizes, data=self._data, say=self._say)

    def _baseline(self, case: Case, found: Found) -> None:
        deadline = time.monotonic() + self._sizes.timeout_s * case.learners

        def tick(step: int) -> None:
            if time.monotonic() > deadline:
                raise CaseFailed(f"the baseline is only at step {step} when its time is over")

        result = train_together(self._sizes, case.learners, case.seed, self._data, tick)
        found.violations += check_baseline(result, self._sizes, case.learners)
        if not check_loss(result.final):
            found.initial_loss, found.held_out_loss = result.initial, result.final


class ArmRun:
    """The processes and files of one arm with one seed."""

    def __init__(
        self, arm: Arm, seed: int, folder: Path, *, sizes: Sizes, data: Path | None, say: Say
    ) -> None:
        self._arm = arm
        self._seed = seed
        self._folder = folder
        self._sizes = sizes
        self._data = data
        self._say = say
        self._checkpoint = folder / "state.ckpt"
        self._tape = folder / "tape.jsonl"
        self._ready = folder / "ready.json"
        self._names = [f"learner-{number}" for number in range(arm.learners)]
        # A fresh run must use a fresh contract, or it would mean to continue an older one (W21).
        self._run_id = f"budget-{arm.name}-seed{seed}-{time.time_ns()}"
        self._said: dict[str, list[str]] = {}

    @property
    def _paths(self) -> Paths:
        return Paths(str(self._checkpoint), str(self._tape), str(self._ready))

    def run(self, found: Found) -> None:
        """All of it, in order; what does not hold is added to `found`."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        with Programs(self._folder) as programs:
            port = self._train(programs)
            layout = files.common_layout([self._layout(name) for name in self._names])
            wanted = expected(self._arm, self._sizes, layout.fingerprint, len(layout), self._run_id)
            before = self._check_cutoff(wanted, found)
            self._consolidate(programs, port, before, wanted, found)
        self._check_result(layout, wanted, before, found)

    # -- processes ---------------------------------------------------------------------------

    def _train(self, programs: Programs) -> int:
        """The cutoff process, up to its exit; returns the endpoint's port."""
        programs.start(CUTOFF, "yeto-syncer", *cutoff_flags(self._arm, self._sizes, self._paths))
        self._wait(programs, "the syncer to listen", self._ready.exists, ends=CUTOFF)
        port = int(json.loads(self._ready.read_text())["port"])
        for number, name in enumerate(self._names):
            flags = learner_flags(
                self._arm,
                self._sizes,
                seed=self._seed,
                learner=number,
                port=port,
                run_id=self._run_id,
                output_dir=str(self._folder / name),
                state_dir=str(self._state(number)),
                data=None if self._data is None else str(self._data),
            )
            programs.start(name, "yeto-learner", *flags)
        self._start_together(programs)
        self._wait_for_exit(programs, CUTOFF, alive=self._names)
        return port

    def _start_together(self, programs: Programs) -> None:
        """Hold every learner where it is connected, until all are.

        A learner trains from then on; on a busy machine the first would have spent its budget
        before the last is there, and nothing would have been merged on the way.
        """
        held: list[str] = []

        def all_held() -> bool:
            for name in self._names:
                if (code := programs.exit_code(name)) is not None:
                    raise self._ended_early(programs, name, code)
                if name not in held and not self._must_have_said(name, CONNECTED):
                    programs.signal(name, signal.SIGSTOP)
                    held.append(name)
            return len(held) == len(self._names)

        try:
            self._wait(programs, "all learners to connect", all_held, ends=CUTOFF)
        finally:
            for name in held:
                programs.signal(name, signal.SIGCONT)

    def _consolidate(
        self,
        programs: Programs,
        port: int,
        before: CheckpointFacts,
        wanted: Expected,
        found: Found,
    ) -> None:
        """The second process on the same endpoint, up to the exit of everyone."""
        flags = consolidation_flags(
            self._arm,
            self._sizes,
            self._paths,
            port=port,
            cutoff=before.step,
            fragments=wanted.fragments,
        )
        self._say(f"cut off at step {before.step}; {wanted.fragments} rounds to consolidate")
        programs.start(CONSOLIDATION, "yeto-syncer", *flags)
        for name in (CONSOLIDATION, *self._names):
            self._wait_for_exit(programs, name)
        target = before.step + wanted.fragments
        for text in (ACKNOWLEDGED, f"training complete after {target} outer steps"):
            found.violations += self._must_have_said(CONSOLIDATION, text)

    def _wait_for_exit(self, programs: Programs, name: str, alive: Sequence[str] = ()) -> None:
        """Until a program has ended with 0, while those of `alive` go on.

        Raises:
            CaseFailed: another code, or one of `alive` ended too.
        """

        def done() -> bool:
            for other in alive:
                if (code := programs.exit_code(other)) is not None:
                    raise self._ended_early(programs, other, code)
            return programs.exit_code(name) is not None

        self._wait(programs, f"{name} to end", done)
        if (code := programs.exit_code(name)) != 0:
            raise CaseFailed(
                f"{name} ended with exit code {code}: {self._last_words(programs, name)}"
            )

    def _wait(
        self, programs: Programs, what: str, condition: Callable[[], bool], ends: str | None = None
    ) -> None:
        """Until `condition` holds; all lines of all programs are read meanwhile."""
        deadline = time.monotonic() + self._sizes.timeout_s
        while not condition():
            line = programs.next_line(TICK_S)
            if line is not None:
                self._said.setdefault(line.program, []).append(line.message)
            if time.monotonic() > deadline:
                raise CaseFailed(f"waited {self._sizes.timeout_s} s for {what}")
            if ends is not None and programs.exit_code(ends) is not None:
                raise CaseFailed(f"{ends} ended early: {self._last_words(programs, ends)}")
        self._hear(programs)

    def _ended_early(self, programs: Programs, name: str, code: int) -> CaseFailed:
        words = self._last_words(programs, name)
        return CaseFailed(f"{name} ended with exit code {code} before the cutoff: {words}")

    def _hear(self, programs: Programs) -> None:
        """Take every line that has been written so far."""
        while (line := programs.next_line(0)) is not None:
            self._said.setdefault(line.program, []).append(line.message)

    def _last_words(self, programs: Programs, name: str) -> str:
        self._hear(programs)
        return " | ".join(self._said.get(name, ["it said nothing"])[-3:])

    def _must_have_said(self, name: str, text: str) -> list[str]:
        if any(text in message for message in self._said.get(name, ())):
            return []
        return [f"C85: {name} did not say {text!r}"]

    # -- files -------------------------------------------------------------------------------

    def _layout(self, name: str) -> Path:
        return self._folder / name / "layout.json"

    def _state(self, learner: int) -> Path:
        return self._folder / f"state-{learner}"

    def _records(self) -> list[TapeRecord]:
        return list(read_tape(self._tape))

    def _check_cutoff(self, wanted: Expected, found: Found) -> CheckpointFacts:
        """The first half of the proof; keeps a copy of what the consolidation will overwrite.

        Raises:
            CaseFailed: something does not hold, so there is nothing to consolidate.
        """
        before = files.checkpoint_facts(self._checkpoint)
        found.cutoff_step, found.fragments = before.step, wanted.fragments
        found.violations += self._must_have_said(CUTOFF, WRITTEN)
        found.violations += check_cutoff(self._records(), before, wanted)
        shutil.copyfile(self._checkpoint, self._folder / "cutoff.ckpt")
        shutil.copyfile(self._tape, self._folder / "cutoff-tape.jsonl")
        if found.violations:
            raise CaseFailed("the cutoff does not hold, so it was not consolidated")
        return before

    def _check_result(
        self, layout: NamedLayout, wanted: Expected, before: CheckpointFacts, found: Found
    ) -> None:
        """The second half of the proof, then the loss of the exported model."""
        after = files.checkpoint_facts(self._checkpoint)
        found.violations += check_consolidation(self._records(), before, after, wanted)
        self._check_payloads(layout, wanted, found)
        exported = files.export_model(
            self._checkpoint, self._folder / "model.safetensors", self._layout(self._names[0])
        )
        saved = [files.learner_results(self._folder / name) for name in self._names]
        found.violations += check_artifacts(
            exported,
            [model for model, _ in saved],
            [result for _, result in saved],
            before.step + wanted.fragments,
        )
        loss = evaluate_export(exported, self._sizes, self._seed, self._data)
        found.violations += check_loss(loss)
        found.held_out_loss = loss
        found.initial_loss = BytesLM(settings(self._sizes, self._seed, self._data)).evaluate()

    def _check_payloads(self, layout: NamedLayout, wanted: Expected, found: Found) -> None:
        """Merges what the learners froze once more and compares (L42)."""
        states = [
            files.frozen_state(self._state(number), number, self._arm.dtype, wanted)
            for number in range(self._arm.learners)
        ]
        found.violations += check_frozen([(s.local_step, s.units) for s in states], wanted)
        replayed = replay(
            files.checkpoint_state(self._folder / "cutoff.ckpt"),
            [files.frozen_tensors(state) for state in states],
            layout,
            self._arm,
            wanted,
        )
        difference = compare(replayed, files.checkpoint_state(self._checkpoint))
        found.violations += check_replay(difference)
        found.replay_difference = difference.relative
        found.bits_equal = difference.bits_equal
