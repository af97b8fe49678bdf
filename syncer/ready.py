"""The ready file: where the listener is, for the program that started this one (cli.md, 4)."""

from __future__ import annotations

import json
import os
from pathlib import Path


class ReadyFile:
    """One line of JSON, there from the moment the listener accepts until the process ends."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._pid = os.getpid()

    def write(self, host: str, port: int, profile: bytes) -> None:
        """Replace the file atomically.

        Args:
            host: address as bound.
            port: port as bound.
            profile: syncer profile hash, 32 bytes.

        Raises:
            OSError: the directory can't be written.
        """
        entry = {"host": host, "port": port, "pid": self._pid, "profile": profile.hex()}
        spare = Path(f"{self._path}.tmp")
        spare.write_text(json.dumps(entry) + "\n", "utf-8")
        os.replace(spare, self._path)

    def remove(self) -> None:
        """Take the file away if it is still this process's."""
        try:
            entry = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return  # someone else's, or gone: not ours to touch
        if isinstance(entry, dict) and entry.get("pid") == self._pid:
            self._path.unlink(missing_ok=True)
