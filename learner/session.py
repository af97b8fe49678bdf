"""What a learner knows about the run, without sockets, threads, clocks or tensors' contents.

Events go in (a broadcast came, a group closed, an optimizer step was done), decisions come out.
Tensors are opaque. The network thread and the training thread share one `Session` under one lock;
no method takes longer than a loop over the fragments.

Modes, whether or not a connection is up (L37):

| mode       | BCAST       | PULL    | final cut, manifest       | SHUTDOWN | group lost           |
|------------|-------------|---------|---------------------------|----------|----------------------|
| TRAIN      | L24, L26    | L23     | cached; M. → FINALIZING   | fatal    | redial (L12)         |
| REPORTED   | ignored     | ignored | cached                    | fatal    | → FROZEN             |
| FROZEN     | base of L42 | L42     | cached; M. → FINALIZING   | fatal    | all is empty (L41)   |
| FINALIZING | ignored     | ignored | L30; ACK begun → ACKED    | fatal    | cut, manifest kept   |
| ACKED      | ignored     | ignored | equal M.: ACK again       | → ENDED  | redial, 30 s (L34)   |

REPORTED and FROZEN are the two budget modes: the connection that carried BUDGET_DONE, and later
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from learner.fragments import (
    Anchor,
    Answer,
    Apply,
    FragmentState,
    Received,
    Verdict,
    monotonic,
)
from wire.errors import ErrorCode, ProtocolError
from wire.messages import FinalManifest, PullRequest

T = TypeVar("T")


class Mode(Enum):
    """Where the learner is in its life (L37)."""

    TRAIN = auto()
    REPORTED = auto()
    FROZEN = auto()
    FINALIZING = auto()
    ACKED = auto()
    ENDED = auto()


@dataclass
class Session(Generic[T]):
    """State of one learner.

    Attributes:
        count: number of fragments F.
        budget: exact steps of a budget run, or None.
        local_step, units: totals of L21.
        generation: of the group that is up, or None.
        warnings: texts for the log, taken by whoever holds the lock.
    """

    count: int
    budget: int | None = None
    local_step: int = 0
    units: int = 0
    generation: int | None = None
    mode: Mode = Mode.TRAIN
    manifest: FinalManifest | None = None
    cut_applied: bool = False
    dropped: int = 0
    replayed: int = 0
    rolled_back: bool = False
    warnings: list[str] = field(default_factory=list)
    _fragments: list[FragmentState[T]] = field(init=False)
    _pulls: dict[int, PullRequest] = field(default_factory=dict)
    _uninitialized: set[int] = field(init=False)
    _manifest_generation: int | None = None
    _warned: int | None = None

    def __post_init__(self) -> None:
        self._fragments = [FragmentState() for _ in range(self.count)]
        self._uninitialized = set(range(self.count))

    # -- the network thread ---------------------------------------------------------------

    def connected(self, generation: int) -> None:
        """A group is up. Whoever dials sends INIT when `init_needed` (L14)."""
        self.generation = generation

    def disconnected(self, generation: int, *, acknowledged: bool = False) -> None:
        """The group is gone: pending PULLs with it, broadcasts kept (L12), except L41.

        An ACK that was begun but not written (`acknowledged` False) is owed again (L32).
        """
        if generation != self.generation:
            return
        self.generation = None
        self._pulls.clear()
        if self.mode is Mode.ACKED and not acknowledged:
            self.mode = Mode.FINALIZING
        if self.mode is Mode.REPORTED:
            self.mode = Mode.FROZEN
        if self.mode is Mode.FROZEN:
            for fragment in self._fragments:
                fragment.memory = fragment.waiting = fragment.anchor = None

    def broadcast(self, generation: int, fragment: int, received: Received[T]) -> Verdict:
        """A BCAST arrived, decoded and digested (L24).

        Raises:
            ProtocolError: equal version with another digest.
        """
        if generation != self.generation:
            return Verdict.IGNORED
        self._uninitialized.discard(fragment)
        if self.mode not in (Mode.TRAIN, Mode.FROZEN):
            return Verdict.IGNORED
        entry = self._fragments[fragment]
        verdict = monotonic("broadcast", fragment, entry.memory, received)
        if verdict is Verdict.DROPPED:
            self.dropped += 1
            if entry.memory_generation != generation:
                self._note_rollback(generation, fragment, received.version)
        elif verdict is Verdict.REPLAYED:
            self.replayed += 1
        else:
            entry.memory = (received.version, received.digest)
            entry.memory_generation = generation
            entry.waiting = received
        return verdict

    def pull(self, generation: int, pull: PullRequest) -> bool:
        """A PULL arrived; whether it is kept (L23)."""
        if generation != self.generation or self.mode not in (Mode.TRAIN, Mode.FROZEN):
            return False
        anchor = self._fragments[pull.fragment].anchor
        if anchor is not None and pull.step <= anchor.version:
            return False
        known = self._pulls.get(pull.fragment)
        if known is not None:
            if (pull.step, pull.attempt) <= (known.step, known.attempt):
                return False
            # Answers go in the order in which the PULLs that are answered arrived.
            del self._pulls[pull.fragment]
        self._pulls[pull.fragment] = pull
        return True

    def final_fragment(self, generation: int, fragment: int, received: Received[T]) -> Verdict:
        """A FINAL_FRAGMENT arrived: its own monotonic cache (L25).

        Raises:
            ProtocolError: equal version with another digest.
        """
        if generation != self.generation:
            return Verdict.IGNORED
        entry = self._fragments[fragment]
        known = None if entry.final is None else (entry.final.version, entry.final.digest)
        verdict = monotonic("final fragment", fragment, known, received)
        if verdict is Verdict.ACCEPTED:
            entry.final = received
        return verdict

    def final_manifest(self, generation: int, manifest: FinalManifest) -> bool:
        """A FINAL_MANIFEST arrived; whether FINAL_ACK is due on this generation now (L32).

        Raises:
            ProtocolError: it differs from the known one.
        """
        if generation != self.generation:
            return False
        if self.manifest is not None and manifest != self.manifest:
            raise ProtocolError(
                ErrorCode.IDENTITY,
                f"the syncer sent a second, different manifest: step {self.manifest.step} "
                f"versions {_clip(self.manifest.versions)}, then step {manifest.step} "
                f"versions {_clip(manifest.versions)}",
            )
        self.manifest = manifest
        self._manifest_generation = generation
        if self.mode in (Mode.TRAIN, Mode.FROZEN):
            self.mode = Mode.FINALIZING
            self._pulls.clear()
        return self.cut_applied

    def shutdown(self, generation: int) -> None:
        """SHUTDOWN arrived (L33, L34).

        Raises:
            ProtocolError: the ACK was not begun yet.
        """
        if generation != self.generation:
            return
        if self.mode is not Mode.ACKED:
            raise ProtocolError(
                ErrorCode.BAD_TYPE, "the syncer sent SHUTDOWN before our FINAL_ACK was sent"
            )
        self.mode = Mode.ENDED

    def ack_begun(self, generation: int) -> None:
        """FINAL_ACK was handed to the group of `generation`."""
        if generation == self.generation and self.mode is Mode.FINALIZING:
            self.mode = Mode.ACKED

    # -- the training thread --------------------------------------------------------------

    def advance(self, tokens: int) -> None:
        """One optimizer step of `tokens` units is done (L21)."""
        self.local_step += 1
        self.units += tokens

    def take_broadcasts(self) -> list[Apply[T]]:
        """The newest waiting broadcast per fragment; call `applied` after each (L20)."""
        if self.mode is not Mode.TRAIN:
            return []
        due: list[Apply[T]] = []
        for index, fragment in enumerate(self._fragments):
            if fragment.waiting is not None:
                previous = None if fragment.anchor is None else fragment.anchor.values
                blend = self._must_blend(index, fragment)
                due.append(Apply(index, fragment.waiting, blend, previous))
                fragment.waiting = None
        return due

    def applied(self, apply: Apply[T], anchor: T) -> None:
        """The model holds the broadcast: it is the fragment's anchor now (L22, L26).

        Args:
            apply: of `take_broadcasts`.
            anchor: its values, in the form that answers want them in.
        """
        fragment, received = self._fragments[apply.fragment], apply.received
        saved, fragment.saved = fragment.saved, None
        if not apply.blend and saved is not None:
            step, units = saved.local_step, saved.units
        else:
            step, units = self.local_step, self.units
        fragment.anchor = Anchor(received.version, received.digest, anchor, step, units)
        fragment.answered = None

    def take_answers(self, *, once: bool = False) -> list[Answer[T]]:
        """The PULLs that can be answered now, in order of arrival (L23).

        Args:
            once: blocking mode; progress since an anchor is given to one round only (every attempt
                of it), a later round's PULL waits for the broadcast that is on its way.
        """
        if self.mode is Mode.FROZEN:
            self._adopt_bases()
        elif self.mode is not Mode.TRAIN:
            return []
        answers: list[Answer[T]] = []
        for pull in list(self._pulls.values()):
            fragment = self._fragments[pull.fragment]
            if fragment.anchor is None:
                continue
            if pull.step <= fragment.anchor.version:
                del self._pulls[pull.fragment]
                continue
            if once and fragment.answered is not None and pull.step > fragment.answered:
                continue
            answer = self._answer(pull, fragment.anchor)
            if answer is not None:
                del self._pulls[pull.fragment]
                fragment.answered = pull.step
                answers.append(answer)
        return answers

    def missing(self) -> list[tuple[int, int, int | None]]:
        """(fragment, wanted version, held version) of what the cut still lacks (L30)."""
        if self.manifest is None:
            raise RuntimeError("no manifest is known")
        held = [None if f.final is None else f.final.version for f in self._fragments]
        wanted = self.manifest.versions
        return [(i, wanted[i], held[i]) for i in range(self.count) if held[i] != wanted[i]]

    def cut(self) -> list[T]:
        """The values of every fragment of the manifest's cut, in layout order (L31)."""
        if self.missing():
            raise RuntimeError("the final cut is not complete")
        return [f.final.values for f in self._fragments if f.final is not None]

    def applied_cut(self) -> int | None:
        """The model holds the cut. The generation to ACK on now, or None: on the next (L32)."""
        if self.missing():
            raise RuntimeError("the versions of the cut changed while it was applied")
        self.cut_applied = True
        ready = self.generation is not None and self.generation == self._manifest_generation
        return self.generation if ready else None

    def report_budget(self) -> int | None:
        """The generation to send BUDGET_DONE on now, or None while no group is up (L40)."""
        if self.generation is not None and self.mode is Mode.TRAIN:
            self.mode = Mode.REPORTED
            self._pulls.clear()
            return self.generation
        return None

    def behind(self) -> list[int]:
        """Fragments with local progress that no applied broadcast holds yet (blocking mode)."""
        return [
            index
            for index, fragment in enumerate(self._fragments)
            if fragment.anchor is None or fragment.anchor.local_step != self.local_step
        ]

    def unanchored(self) -> list[int]:
        """Fragments without an applied broadcast."""
        return [i for i, fragment in enumerate(self._fragments) if fragment.anchor is None]

    # -- views ------------------------------------------------------------------------------

    @property
    def init_needed(self) -> bool:
        """A broadcast of some fragment was never received in this process (L14)."""
        return bool(self._uninitialized)

    @property
    def finalizing(self) -> bool:
        """The manifest is known."""
        return self.mode in (Mode.FINALIZING, Mode.ACKED, Mode.ENDED)

    @property
    def stale_steps(self) -> int:
        """Own steps since the broadcast that was applied the longest ago, over all fragments."""
        since = [0 if f.anchor is None else f.anchor.local_step for f in self._fragments]
        return self.local_step - min(since)

    @property
    def acknowledged(self) -> bool:
        """FINAL_ACK was begun."""
        return self.mode in (Mode.ACKED, Mode.ENDED)

    @property
    def pending_pulls(self) -> int:
        """PULLs not answered yet."""
        return len(self._pulls)

    @property
    def anchors(self) -> tuple[Anchor[T] | None, ...]:
        """Per fragment the anchor, or the saved one that no broadcast confirmed yet."""
        return tuple(f.anchor or f.saved for f in self._fragments)

    def resume(self, local_step: int, units: int, saved: Mapping[int, Anchor[T]]) -> None:
        """Continue an earlier process at its saved step boundary (L52)."""
        self.local_step, self.units = local_step, units
        for index, anchor in saved.items():
            self._fragments[index].saved = anchor

    # -- internals --------------------------------------------------------------------------

    def _answer(self, pull: PullRequest, anchor: Anchor[T]) -> Answer[T] | None:
        if self.generation is None:
            return None
        if self.mode is Mode.FROZEN:
            # L42: the whole budget is the progress, whatever the base.
            c_steps, c_tokens = self.local_step, self.units
        else:
            c_steps = self.local_step - anchor.local_step
            c_tokens = self.units - anchor.units
        if c_steps == 0:
            return None
        return Answer(
            pull=pull,
            generation=self.generation,
            base_version=anchor.version,
            local_step=self.local_step,
            c_steps=c_steps,
            c_tokens=c_tokens,
            anchor=anchor.values,
        )

    def _adopt_bases(self) -> None:
        """In a budget run a broadcast is a base and changes no parameter (L42)."""
        for fragment in self._fragments:
            if fragment.waiting is not None:
                got, fragment.waiting = fragment.waiting, None
                fragment.anchor = Anchor(
                    got.version, got.digest, got.values, self.local_step, self.units
                )

    def _must_blend(self, index: int, fragment: FragmentState[T]) -> bool:
        saved, waiting = fragment.saved, fragment.waiting
        if saved is None or waiting is None:
            return True
        if (saved.version, saved.digest) == (waiting.version, waiting.digest):
            return False
        if waiting.version <= saved.version:
            self.rolled_back = True
            self.warnings.append(
                f"the syncer was rolled back: fragment {index} came at version {waiting.version}"
                f"{' with other values' if waiting.version == saved.version else ''}, our saved "
                f"state had version {saved.version}; its state is adopted"
            )
        return True

    def _note_rollback(self, generation: int, fragment: int, version: int) -> None:
        """What an earlier connection delivered is newer than what this one starts with (L24)."""
        self.rolled_back = True
        if self._warned != generation:
            self._warned = generation
            self.warnings.append(
                f"the syncer was rolled back: fragment {fragment} came at version {version} after "
                "a redial, older than what we hold; it will refuse our pushes until it has caught "
                "up, restarting this learner adopts its state"
            )


def _clip(versions: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, versions[:8]))
    return f"[{shown}{', …' if len(versions) > 8 else ''}]"
