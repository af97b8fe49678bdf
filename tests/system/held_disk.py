"""A disk whose fsync waits while a file named `hold` is in the working directory.

`held` appears there as soon as a checkpoint write waits: a seam in which a test can act on the
real process in the middle of a save.
"""

from __future__ import annotations

import time
from pathlib import Path

from checkpoint.files import FileSystem

HOLD, HELD = "hold", "held"


def install() -> None:
    """Patch this process."""
    fsync = FileSystem.fsync

    def held_fsync(self: FileSystem, fd: int) -> None:
        while Path(HOLD).exists():
            Path(HELD).touch()
            time.sleep(0.005)
        fsync(self, fd)

    FileSystem.fsync = held_fsync  # type: ignore[method-assign]
