"""Refuses a HELLO that was accepted before (S4)."""

from __future__ import annotations

from wire.errors import ErrorCode, ProtocolError

REPLAY_MEMORY = 65_536
"""Accepted (id, generation) pairs the syncer remembers (S4)."""


class ReplayGuard:
    """The (id, generation) pairs accepted in the life of a syncer (S4).

    Bounded: the last `capacity` are kept, the oldest is forgotten first.
    """

    def __init__(self, capacity: int = REPLAY_MEMORY) -> None:
        self._capacity = capacity
        self._seen: dict[tuple[int, int], None] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def check(self, learner_id: int, generation: int) -> None:
        """Refuse a pair that was accepted before.

        Raises:
            ProtocolError: `duplicate-generation`.
        """
        if (learner_id, generation) in self._seen:
            raise ProtocolError(
                ErrorCode.DUPLICATE_GENERATION,
                f"generation {generation:016x} of learner {learner_id} was accepted before",
            )

    def remember(self, learner_id: int, generation: int) -> None:
        """Note an accepted pair; a refused HELLO must not be noted."""
        self._seen.setdefault((learner_id, generation))
        if len(self._seen) > self._capacity:
            del self._seen[next(iter(self._seen))]
