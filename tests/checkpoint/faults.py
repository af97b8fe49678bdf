"""File layers for tests: they see every operation of the store, and stop or fail it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from checkpoint.files import Buffer, FileSystem

Step = tuple[str, str, str]
"""(before | after, operation, name within the checkpoint's directory)."""


class WatchedFiles(FileSystem):
    """Calls `watch(step)` before and after every operation that changes the disk.

    `rename` and `link` go by the name they give: ("after", "rename", "P") is the end of F5.
    """

    def __init__(self, watch: Callable[[Step], None]) -> None:
        self._watch = watch
        self._names: dict[int, str] = {}

    def create(self, path: Path) -> int:
        self._watch(("before", "create", path.name))
        fd = super().create(path)
        self._names[fd] = path.name
        self._watch(("after", "create", path.name))
        return fd

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._names[fd] = path.name
        return fd

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        self._watch(("before", "pwrite", self._names[fd]))
        taken = self._pwrite(fd, data, offset)
        self._watch(("after", "pwrite", self._names[fd]))
        return taken

    def _pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return super().pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._watch(("before", "truncate", self._names[fd]))
        super().truncate(fd, size)
        self._watch(("after", "truncate", self._names[fd]))

    def fsync(self, fd: int) -> None:
        self._watch(("before", "fsync", self._names[fd]))
        super().fsync(fd)
        self._watch(("after", "fsync", self._names[fd]))

    def link(self, source: Path, target: Path) -> None:
        self._watch(("before", "link", target.name))
        super().link(source, target)
        self._watch(("after", "link", target.name))

    def rename(self, source: Path, target: Path) -> None:
        self._watch(("before", "rename", target.name))
        super().rename(source, target)
        self._watch(("after", "rename", target.name))

    def unlink(self, path: Path) -> bool:
        self._watch(("before", "unlink", path.name))
        removed = super().unlink(path)
        self._watch(("after", "unlink", path.name))
        return removed

    def sync_directory(self, path: Path) -> None:
        self._watch(("before", "sync_directory", ""))
        super().sync_directory(path)
        self._watch(("after", "sync_directory", ""))


class ShortWrites(FileSystem):
    """Every write takes at most a few bytes."""

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return super().pwrite(fd, memoryview(data)[:7], offset)


class FullDisk(WatchedFiles):
    """A write takes half of its bytes and the next fails, while `full` is set."""

    def __init__(self) -> None:
        super().__init__(lambda _step: None)
        self.full = False
        self._torn = False

    def _pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        if not self.full:
            return super()._pwrite(fd, data, offset)
        if self._torn or len(data) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = True
        return super()._pwrite(fd, memoryview(data)[: len(data) // 2], offset)


class NoLinks(FileSystem):
    """A file system without hard links."""

    def link(self, source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


class NoLocks(FileSystem):
    """A file system without locks."""

    def try_lock(self, fd: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def steps_of(work: Callable[[FileSystem], None]) -> list[Step]:
    """All steps of some work, in order."""
    seen: list[Step] = []
    work(WatchedFiles(seen.append))
    return seen


def killed_at(index: int) -> FileSystem:
    """A layer that ends its own process with SIGKILL at the step of that index."""
    left = [index]

    def watch(_step: Step) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    return WatchedFiles(watch)


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; returns what `os.waitpid` says of its end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]
