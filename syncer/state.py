"""The global model as the coordinator owns it: step, fragments, ledger (C1, N21)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from syncer.merge.plan import MergeResult
from syncer.session import SessionFacts

U64_MAX = 2**64 - 1


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
