"""One module per target. Each has `one_input(data)`, which raises only when it has found a bug.

A target catches the one error that its room may raise about bad input, and checks what must hold
whatever the input was.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

NAMES = ("checkpoint", "chunks", "connection", "hello", "sums", "svd")


def load(name: str) -> Callable[[bytes], None]:
    """The entry function of a target."""
    entry: Callable[[bytes], None] = importlib.import_module(f"fuzz.targets.{name}").one_input
    return entry


class Reader:
    """Takes small choices from the front of the input; zeros once it has run out."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        """The next byte."""
        return next(iter(self.take(1)), 0)

    def take(self, count: int) -> bytes:
        """Up to `count` bytes."""
        piece = self.data[self.at : self.at + count]
        self.at += len(piece)
        return piece

    def __bool__(self) -> bool:
        return self.at < len(self.data)
