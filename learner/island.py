"""The two sides of a several-rank island: the leader announces, the followers do the same (L60)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner import errors
from learner.errors import LearnerError
from learner.events import Result
from learner.masters import Masters
from learner.parameters import Parameters
from learner.ranks import Operation, Ranks
from wire.layout import NamedLayout


class LedParameters(Parameters):
    """The leader's parameters: what is written here is written on every rank."""

    def __init__(
        self,
        trainables: dict[str, nn.Parameter],
        layout: NamedLayout,
        ranks: Ranks,
        take: Callable[[int], Tensor],
        masters: Masters,
    ) -> None:
        super().__init__(trainables, layout, take=take, masters=masters)
        self._ranks = ranks

    def snapshot(self, fragment: int) -> Tensor:
        """See `Parameters`; sharded parameters are gathered from every rank."""
        self._announce_gather(fragment)
        return super().snapshot(fragment)

    def delta(self, fragment: int, anchor: Tensor) -> Tensor:
        """See `Parameters`; sharded parameters are gathered from every rank."""
        self._announce_gather(fragment)
        return super().delta(fragment, anchor)

    def blend(self, fragment: int, values: Tensor, alpha: float) -> None:
        """See `Parameters`."""
        self._ranks.announce(Operation.BLEND, fragment)
        self._ranks.values(values)
        super().blend(fragment, values, alpha)

    def apply_cut(self, values: list[Tensor]) -> None:
        """See `Parameters`; and every rank confirms that it holds the whole cut."""
        for fragment, final in enumerate(values):
            self._ranks.announce(Operation.OVERWRITE, fragment)
            self._ranks.values(final)
            self.overwrite(fragment, final)
        self._ranks.announce(Operation.CONFIRM)
        if not self._ranks.least(1):
            raise LearnerError("a rank of this island did not apply the whole final cut")

    def _announce_gather(self, fragment: int) -> None:
        if self.sharded:
            self._ranks.announce(Operation.GATHER, fragment)


@contextmanager
def led(ranks: Ranks, result: Callable[[], Result | None]) -> Iterator[None]:
    """The leader's share of one boundary: whatever its outcome, every rank learns of it (L62)."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}\n{error}"
        ranks.announce(Operation.FATAL, len(text.encode()))
        ranks.text(text, len(text.encode()))
        raise
    end = result()
    ranks.announce(Operation.DONE, end is not None, 0 if end is None else end.step)
    if end is not None:
        ranks.values(torch.tensor(end.versions, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class BoundaryEnd:
    """What a follower learns at the end of a boundary; `versions` only when the run is over."""

    applied: tuple[int, ...]
    step: int
    versions: tuple[int, ...] | None


class Follower:
    """Every rank but the first: does what the leader announces."""

    def __init__(
        self,
        ranks: Ranks,
        parameters: Parameters,
        alpha: float,
        save: Callable[[bool], None],
    ) -> None:
        """
        Args:
            ranks: the island.
            parameters: this rank's.
            alpha: local share of the blend, equal on all ranks.
            save: saves this rank's durable state; True waits for the disk.
        """
        self._ranks = ranks
        self._parameters = parameters
        self._alpha = alpha
        self._save = save

    def follow(self) -> BoundaryEnd:
        """Until the leader says that the boundary is over.

        Raises:
            LearnerError: the error that the leader raises, of the same class.
        """
        applied: list[int] = []
        overwritten: set[int] = set()
        while True:
            operation, first, second = self._ranks.listen()
            match operation:
                case Operation.BLEND:
                    self._parameters.blend(first, self._received(first), self._alpha)
                    applied.append(first)
                case Operation.OVERWRITE:
                    self._parameters.overwrite(first, self._received(first))
                    overwritten.add(first)
                case Operation.GATHER:
                    self._parameters.take_part(first)
                case Operation.CONFIRM:
                    self._ranks.least(len(overwritten) == len(self._parameters))
                case Operation.SAVE:
                    self._save(bool(first))
                case Operation.DONE:
                    return self._end(applied, bool(first), second)
                case Operation.FATAL:
                    self._fail(first)

    def _received(self, fragment: int) -> Tensor:
        values = self._parameters.room(fragment)
        self._ranks.values(values)
        return values

    def _end(self, applied: list[int], stop: bool, step: int) -> BoundaryEnd:
        versions = None
        if stop:
            received = torch.zeros(len(self._parameters), dtype=torch.int64)
            self._ranks.values(received)
            versions = tuple(received.tolist())
        return BoundaryEnd(tuple(applied), step, versions)

    def _fail(self, length: int) -> None:
        name, _, text = self._ranks.text(None, length).partition("\n")
        kind = getattr(errors, name, LearnerError)
        known = isinstance(kind, type) and issubclass(kind, LearnerError)
        raise (kind if known else LearnerError)(text)
