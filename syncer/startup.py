"""From nothing to a common model: the INIT set, the resumed file, and C9 (C5 to C9, W19, P3).

    collecting -> decoding -> removing the marker -> (saving version 0) -> published
A resumed run starts at "removing the marker" as soon as a HELLO fixes the session.
"""

from __future__ import annotations

from checkpoint.snapshot import Snapshot
from syncer.commands import DecodeInit, RemoveMarker, SaveKind, SendBroadcast
from syncer.context import Context, Phase
from syncer.events import InitDecoded, InitReceived, Member, TaskDone
from syncer.membership import Group
from syncer.saving import SaveJob, Saver
from syncer.session import ResumeSource
from syncer.state import Model
from wire.messages import Buffer


class Startup:
    """Everything before the start barrier."""

    def __init__(self, ctx: Context, saver: Saver, resumed: ResumeSource | None) -> None:
        self._ctx = ctx
        self._saver = saver
        self._ledger_ids = None if resumed is None else frozenset(resumed.ledger_ids)
        self._owner: Member | None = None
        self._tensors: dict[int, Buffer] = {}
        self._complete = False
        self._ticket: int | None = None
        self._first_hello: float | None = None
        self._silence_at: float | None = None
        self._patience_over = False
        self.published = False
        """C9 is done: whoever registers now gets every fragment at once (C37)."""

    @property
    def _fresh(self) -> bool:
        return self._ledger_ids is None

    @property
    def _delivers_only(self) -> bool:
        """A run resumed at t_g = T has nothing left to do but deliver (C8)."""
        model = self._ctx.model
        return model is not None and model.global_step == self._ctx.config.total_steps

    # ---- groups come and go

    def registered(self, group: Group, snapshot: Snapshot | None, now: float) -> None:
        """A HELLO was accepted; `snapshot` is the resumed state when it is not installed yet."""
        if self._first_hello is None:
            self._first_hello = now
        if group.member.learner_id == 0:
            if not self._complete:
                self._drop_set()
            self._watch_init(now)
        if snapshot is not None and self._ctx.model is None:
            self._ctx.model = Model.resumed(snapshot)
            self._ctx.log("info", f"resumed at step {snapshot.global_step}")
            self._prepare(now)

    def group_gone(self, group: Group) -> None:
        """Its incomplete INIT set goes (C86); without any group the session goes (W19)."""
        if group.member.learner_id == 0 and self._ctx.members.current_of(0) is None:
            self._silence_at = None
        if self._owner == group.member and not self._complete:
            self._drop_set()
        if len(self._ctx.members) == 0 and self._may_release():
            self._release()

    def _may_release(self) -> bool:
        if self._fresh:
            return not self._complete
        return self._ctx.phase is Phase.INIT

    def _release(self) -> None:
        """W19: the next HELLO fixes a new session; a resumed file keeps its expectations."""
        self._drop_set()
        self._ctx.forget(self._ticket)
        self._ticket = None
        self._ctx.model = None
        self.published = False
        if self._ctx.session is not None:
            self._ctx.session = None
            self._ctx.log("info", "nobody is connected: the session is forgotten")

    def _drop_set(self) -> None:
        self._owner = None
        self._tensors = {}

    # ---- the INIT set

    def init(self, event: InitReceived, now: float) -> None:
        """One fragment of the initial model (C5), or one to drop (C6)."""
        group = self._ctx.members.get(event.member)
        session = self._ctx.session
        if (
            group is None
            or session is None
            or not group.current
            or self._complete
            or not self._fresh
            or event.fragment in self._tensors
        ):
            self._ctx.drop("init")
            return
        self._owner = event.member
        self._tensors[event.fragment] = event.tensor
        self._watch_init(now)
        count = len(session.layout)
        if len(self._tensors) < count:
            return
        self._complete = True
        self._silence_at = None
        tensors = tuple(self._tensors[fragment] for fragment in range(count))
        self._tensors = {}
        self._ticket = self._ctx.ask(lambda ticket: DecodeInit(ticket, tensors), self._decoded)

    def _decoded(self, event: InitDecoded, now: float) -> None:
        self._ctx.model = Model.fresh(event.params)
        self._ctx.log("info", f"learner 0 initialized {len(event.params)} fragments")
        self._prepare(now)

    # ---- C9, in order

    def _prepare(self, now: float) -> None:
        """A stale marker goes before anyone can see the model (K22)."""
        if self._ctx.phase is not Phase.INIT:
            return
        if self._delivers_only:
            self.published = True
        else:
            self._ticket = self._ctx.ask(RemoveMarker, self._marker_removed)

    def _marker_removed(self, event: TaskDone, now: float) -> None:
        model, session = self._ctx.model, self._ctx.session
        if self._ctx.phase is not Phase.INIT or model is None or session is None:
            return
        if self._fresh and self._ctx.config.checkpoint_every == 1:
            snapshot = model.snapshot(session, self._ctx.config.iso_backend)
            self._saver.submit(SaveJob(SaveKind.INITIAL, snapshot, self._publish))
        else:
            self._publish(now)

    def _publish(self, now: float) -> None:
        """Every fragment at its version to every current group, fragment-major."""
        model = self._ctx.model
        if self._ctx.phase is not Phase.INIT or model is None:
            return
        self.published = True
        members = self._ctx.members.current()
        if not members:
            return
        for index, state in enumerate(model.fragments):
            self._ctx.emit(SendBroadcast(members, index, state.version, state.params))

    # ---- the barrier

    def barrier_met(self) -> bool:
        """C8: initialized, published, and enough distinct current ids."""
        if not self.published:
            return False
        ids = self._ctx.members.ids
        if not self._delivers_only:
            return len(ids) >= self._ctx.config.barrier_quorum
        if self._ledger_ids is not None and all(known in ids for known in self._ledger_ids):
            return len(ids) > 0
        return self._patience_over and len(ids) >= self._ctx.config.barrier_quorum

    @property
    def _patience_ends(self) -> float | None:
        if self._first_hello is None:
            return None
        return self._first_hello + self._ctx.config.quorum_timeout

    def deadline(self) -> float | None:
        """When the barrier may fall for time alone, or a silent learner 0 is reported."""
        times = [] if self._silence_at is None else [self._silence_at]
        patience = self._patience_ends
        if self._delivers_only and patience is not None and not self._patience_over:
            times.append(patience)
        return min(times, default=None)

    # ---- P3

    def _watch_init(self, now: float) -> None:
        if self._fresh and not self._complete:
            self._silence_at = now + self._ctx.config.handshake_timeout

    def tick(self, now: float) -> None:
        """C8: patience with missing ids ends; P3: say why a run without INIT does not start."""
        patience = self._patience_ends
        if patience is not None and now >= patience:
            self._patience_over = True
        if self._silence_at is None or now < self._silence_at:
            return
        self._silence_at = None
        session = self._ctx.session
        have = "nothing" if session is None else f"{len(self._tensors)} of {len(session.layout)}"
        self._ctx.log(
            "warning",
            "learner 0 is connected but sent no INIT for "
            f"{self._ctx.config.handshake_timeout:g} s ({have} fragments are here). A client that "
            "sends INIT once per process cannot send it again: restart learner 0",
        )
