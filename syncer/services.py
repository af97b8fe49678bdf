"""What the actor's commands use beside the sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from checkpoint.snapshot import Snapshot
from syncer.merge.plan import SvdBackend
from syncer.tape import TapeWriter


class Store(Protocol):
    """What the actor needs of the checkpoint store; every method blocks."""

    def save(
        self,
        snapshot: Snapshot,
        *,
        patch: bool,
        last: bool,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        """Make one cut durable (K10); `before_publish` runs right before it takes its name."""

    def write_marker(self, step: int) -> None:
        """Declare the checkpoint final (K20)."""

    def remove_marker(self) -> None:
        """Remove a stale declaration (K22)."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the commands use beside the sockets.

    Attributes:
        store: the checkpoint.
        svd: where iso matrices are flattened.
        drain_svd: waits for the pool, None without one (N33).
        write_final_state: writes `--final-state`, None when it is off.
        tape: the event tape, None when it is off.
        heloco: whether merges will correct gradients.
    """

    store: Store
    svd: SvdBackend
    drain_svd: Callable[[], None] | None
    write_final_state: Callable[[Snapshot], None] | None
    tape: TapeWriter | None
    heloco: bool = True
