"""What the demo remembers of a run, from log lines and the event tape; no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.demo.programs import Line
from syncer.tape import CommitRecord, TapeMember

ALONE = "alone"
"""Name of the learner that trains without the others."""


@dataclass
class LearnerRecord:
    """One learner: held-out losses as (Unix seconds, own step, nats per byte), and totals."""

    held_out: list[tuple[float, int, float]] = field(default_factory=list)
    local_step: int = 0
    tokens_per_s: float = 0.0
    push_bytes: int = 0
    training_loss: float | None = None
    final_step: int | None = None

    @property
    def first_loss(self) -> float:
        """Held-out loss before the first step."""
        return self.held_out[0][2]

    @property
    def last_loss(self) -> float:
        """The newest held-out loss; at the end, that of the final model."""
        return self.held_out[-1][2]

    @property
    def evaluated_step(self) -> int:
        """Own step of the newest held-out loss; -1 before the first."""
        return self.held_out[-1][1] if self.held_out else -1

    def loss_at(self, step: int) -> float:
        """Held-out loss after so many own steps, between two evaluations on the line."""
        steps = [known for _, known, _ in self.held_out]
        return float(np.interp(step, steps, [loss for _, _, loss in self.held_out]))


def ids(members: Iterable[TapeMember]) -> set[int]:
    """Learner ids of tape members."""
    return {member.id for member in members}


@dataclass
class RunRecord:
    """All learners by name, one that trains without them, and the commits of the tape (C41)."""

    learners: dict[str, LearnerRecord] = field(default_factory=dict)
    alone: LearnerRecord | None = None
    rounds: list[CommitRecord] = field(default_factory=list)

    def add_line(self, line: Line) -> None:
        """Takes what a line of a learner says; lines of other programs say nothing here."""
        learner = self.alone if line.program == ALONE else self.learners.get(line.program)
        if learner is None:
            return
        fields = line.fields
        learner.local_step = max(learner.local_step, fields.get("local_step") or 0)
        if line.event in ("evaluation", "final"):
            step, loss = fields["local_step"], fields["held_out_loss"]
            learner.held_out.append((line.ts, step, loss))
        if line.event == "final":
            learner.final_step = fields["step"]
        if line.event == "progress":
            learner.tokens_per_s = fields["tokens_per_s"]
            learner.push_bytes = fields["push_bytes"]
            learner.training_loss = fields["loss"]

    @property
    def merged_loss(self) -> float:
        """Held-out loss of the final model, which all learners have in common."""
        return next(iter(self.learners.values())).last_loss

    @property
    def first_loss(self) -> float:
        """Held-out loss of the common initial model."""
        return next(iter(self.learners.values())).first_loss

    @property
    def own_steps(self) -> int:
        """Optimizer steps of the learner that did most."""
        return max(learner.local_step for learner in self.learners.values())

    def staleness(self, learner_id: int) -> int | None:
        """Of the newest answer of this learner, in versions."""
        for commit in reversed(self.rounds):
            for responder in commit.responders:
                if responder.id == learner_id:
                    return responder.staleness
        return None

    def answers(self, learner_id: int) -> int:
        """How many rounds this learner answered in time."""
        return sum(learner_id in ids(commit.responded) for commit in self.rounds)
