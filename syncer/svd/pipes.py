"""Whole reads and writes on unbuffered pipes."""

from __future__ import annotations

from io import RawIOBase


def read_into(source: RawIOBase, target: memoryview) -> int:
    """Fill `target`; fewer bytes than its length only at the end of input.

    Raises:
        OSError: the pipe failed.
    """
    got = 0
    while got < len(target):
        count = source.readinto(target[got:])
        if not count:
            break
        got += count
    return got


def write_all(sink: RawIOBase, data: bytes | memoryview) -> None:
    """Write every byte.

    Raises:
        OSError: the pipe failed, BrokenPipeError when its reader is gone.
    """
    view = memoryview(data)
    while view:
        count = sink.write(view)
        view = view[count or 0 :]
