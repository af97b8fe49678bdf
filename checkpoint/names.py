"""The names that belong to a checkpoint path P, all formed by appending to the whole name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Names:
    """P and its adjacent names; a bare file name means the working directory."""

    checkpoint: Path

    @property
    def directory(self) -> Path:
        """Where all of them live."""
        return self.checkpoint.parent

    @property
    def spare(self) -> Path:
        """`P.tmp`: the next file while it is written, between writes the file to patch (K12)."""
        return self._adjacent(".tmp")

    @property
    def previous(self) -> Path:
        """`P.prev`: second name of the old file while the new one takes its place (K11 F4)."""
        return self._adjacent(".prev")

    @property
    def sums(self) -> Path:
        """`P.sums`: integrity side file (K15)."""
        return self._adjacent(".sums")

    @property
    def sums_temporary(self) -> Path:
        """`P.sums.tmp`."""
        return self._adjacent(".sums.tmp")

    @property
    def marker(self) -> Path:
        """`P.final` (K20)."""
        return self._adjacent(".final")

    @property
    def marker_temporary(self) -> Path:
        """`P.final.tmp`."""
        return self._adjacent(".final.tmp")

    @property
    def lock(self) -> Path:
        """`P.lock` (K8)."""
        return self._adjacent(".lock")

    def all(self) -> tuple[Path, ...]:
        """P and every adjacent name; no other option may name any of them."""
        return (
            self.checkpoint,
            self.spare,
            self.previous,
            self.sums,
            self.sums_temporary,
            self.marker,
            self.marker_temporary,
            self.lock,
        )

    def _adjacent(self, suffix: str) -> Path:
        return Path(f"{self.checkpoint}{suffix}")
