"""The global model as the coordinator owns it: step, fragments, ledger (C1, N21)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from syncer.merge.plan import MergeResult
from syncer.session import SessionFacts
from wire.messages import Hello

U64_MAX = 2**64 - 1


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

    def snapshot_for(self, hello: Hello) -> Snapshot:
        """The state to install; raises ProtocolError `checkpoint-mismatch` (K18)."""
        ...


class Model:
    """t_g, the fragments and the ledger. Tensors are replaced, never mutated (house rule).

    Attributes:
        global_step: t_g, the last committed round.
        fragments: state per fragment, in layout order.
        ledger: learner id -> totals.
    """

    def __init__(
        self,
        global_step: int,
        fragments: Iterable[FragmentState],
        ledger: Iterable[tuple[int, LedgerEntry]] = (),
    ) -> None:
        self.global_step = global_step
        self.fragments = list(fragments)
        self.ledger = dict(ledger)

    @classmethod
    def fresh(cls, params: Sequence[Tensor]) -> Model:
        """Version 0 everywhere, momentum 0, t_g 0 (C5). `params`: f32, 1-D each."""
        return cls(0, (FragmentState(0, values, torch.zeros_like(values)) for values in params))

    @classmethod
    def resumed(cls, snapshot: Snapshot) -> Model:
        """The state of a checkpoint, all or nothing (K18)."""
        return cls(snapshot.global_step, snapshot.fragments, snapshot.ledger.items())

    def apply(
        self,
        step: int,
        fragment: int,
        result: MergeResult,
        responders: Iterable[tuple[int, int, int]],
    ) -> None:
        """Install a merged round: version, step, ledger (C32, N21).

        Args:
            step: t of the round, t_g + 1.
            fragment: p of the round.
            result: its new tensors.
            responders: (learner id, c_steps, c_tokens) of each response.
        """
        self.fragments[fragment] = FragmentState(step, result.params, result.momentum)
        self.global_step = step
        for learner_id, steps, tokens in responders:
            old = self.ledger.get(learner_id, LedgerEntry(0, 0, 0))
            self.ledger[learner_id] = LedgerEntry(
                old.merges + 1,
                min(old.steps + steps, U64_MAX),
                min(old.tokens + tokens, U64_MAX),
            )

    def snapshot(self, session: SessionFacts, backend: int) -> Snapshot:
        """An immutable cut that shares the tensors (K1)."""
        return Snapshot(
            backend=backend,
            fingerprint=session.fingerprint,
            contract=session.contract,
            global_step=self.global_step,
            fragments=tuple(self.fragments),
            ledger=dict(self.ledger),
        )
