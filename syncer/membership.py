"""Who is connected: current and superseded generations (C19, W14)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from syncer.events import Member
from syncer.pacing import StepEstimate


@dataclass(slots=True, eq=False)
class Group:
    """One live connection group.

    Attributes:
        member: its learner id and generation.
        since: when its HELLO was accepted.
        current: whether it is its id's newest generation.
        superseded_at: when a newer generation took its place.
        estimate: seconds per local step (C14).
        eligible: the final cut was queued on it (C60).
        acked: its own FINAL_ACK was accepted (C63).
    """

    member: Member
    since: float
    current: bool = True
    superseded_at: float = 0.0
    estimate: StepEstimate = field(default_factory=StepEstimate)
    eligible: bool = False
    acked: bool = False


class Membership:
    """All live groups by (id, generation), and the current one of each id."""

    def __init__(self) -> None:
        self._groups: dict[Member, Group] = {}
        self._current: dict[int, Group] = {}
        self._closing: set[Member] = set()
        self._superseded: deque[Group] = deque()
        self._sorted: tuple[Member, ...] | None = None
        self._set: frozenset[Member] = frozenset()

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, member: Member) -> Group | None:
        """The live group of this generation."""
        return self._groups.get(member)

    def holds(self, member: Member) -> bool:
        """Whether this exact generation is live, or still being closed (W12 step 14)."""
        return member in self._groups or member in self._closing

    def groups(self) -> Iterable[Group]:
        """All live groups, superseded ones included."""
        return self._groups.values()

    def current_of(self, learner_id: int) -> Group | None:
        """The current group of an id."""
        return self._current.get(learner_id)

    @property
    def ids(self) -> Collection[int]:
        """Distinct ids with a current group."""
        return self._current.keys()

    def current(self) -> tuple[Member, ...]:
        """All current groups, sorted; the same object until membership changes."""
        if self._sorted is None:
            self._sorted = tuple(sorted(group.member for group in self._current.values()))
            self._set = frozenset(self._sorted)
        return self._sorted

    def current_set(self) -> frozenset[Member]:
        """The members of `current()` as a set."""
        self.current()
        return self._set

    def register(self, member: Member, now: float) -> Group:
        """Make this generation the current one of its id, superseding another (C19)."""
        old = self._current.get(member.learner_id)
        if old is not None:
            old.current = False
            old.superseded_at = now
            self._superseded.append(old)
        group = Group(member, now)
        self._groups[member] = group
        self._current[member.learner_id] = group
        self._sorted = None
        return group

    def remove(self, member: Member, *, closing: bool = False) -> Group | None:
        """Forget a group; its disconnect never removes a newer generation (C19).

        Args:
            member: the generation that is gone.
            closing: we close it ourselves, `gone` follows when its sockets are.
        """
        group = self._groups.pop(member, None)
        if group is None:
            return None
        if closing:
            self._closing.add(member)
        if group.current:
            group.current = False
            del self._current[member.learner_id]
            self._sorted = None
        return group

    def gone(self, member: Member) -> bool:
        """The sockets of a group we closed are gone; False when it was not such a group."""
        if member not in self._closing:
            return False
        self._closing.remove(member)
        return True

    def oldest_superseded(self) -> float | None:
        """Since when the oldest queued superseded group that still lives has been so."""
        while self._superseded:
            group = self._superseded[0]
            if self._groups.get(group.member) is group:
                return group.superseded_at
            self._superseded.popleft()
        return None

    def take_superseded(self, timeout: float, now: float) -> list[Group]:
        """Take the groups superseded at least `timeout` seconds ago out of the queue."""
        taken = []
        while (oldest := self.oldest_superseded()) is not None and oldest + timeout <= now:
            taken.append(self._superseded.popleft())
        return taken

    def step_seconds(self, captured: Iterable[Member]) -> float | None:
        """ξ_step of a round: the slowest estimate of its captured members (C13, C17)."""
        slowest = None
        for member in captured:
            group = self._groups.get(member)
            if group is None or group.estimate.seconds is None:
                continue
            if slowest is None or group.estimate.seconds > slowest:
                slowest = group.estimate.seconds
        return slowest
