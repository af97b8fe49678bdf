"""The few file operations that durable writes are made of, in one replaceable object.

Everything that changes a disk goes through a `FileSystem`, one system call a method, so a reader
of store.py sees the order of the calls, and a test can stop or fail any of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

Buffer = bytes | bytearray | memoryview

log = logging.getLogger(__name__)

NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""What flock answers on a file system without locks."""
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What link answers on a file system without hard links."""


class FileSystem:
    """The real disk. All methods block, and raise OSError."""

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing; it must not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: Path) -> int:
        """Open an existing file for reading and writing; never follows a symbolic link."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        """Write some of `data`; returns how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        """Set the exact size."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """Wait until the file's content and size are on the disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor, and with it its lock."""
        os.close(fd)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Move a name over another, atomically."""
        os.rename(source, target)

    def unlink(self, path: Path) -> bool:
        """Remove a name; returns False where there was none."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's names are on the disk (K7)."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def try_lock(self, fd: int) -> bool:
        """Take an exclusive flock without waiting; False when someone else holds a lock."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def write_all(files: FileSystem, fd: int, offset: int, buffers: Iterable[Buffer]) -> int:
    """Write all buffers one after the other from `offset`; returns the offset behind them."""
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            taken = files.pwrite(fd, rest, offset)
            if taken <= 0:
                raise OSError(errno.EIO, "a write took no bytes")
            offset += taken
            rest = rest[taken:]
    return offset


def write_new(files: FileSystem, path: Path, buffers: Iterable[Buffer]) -> None:
    """Write a complete new file and fsync it; an old file of that name is unlinked first."""
    files.unlink(path)
    fd = files.create(path)
    try:
        write_all(files, fd, 0, buffers)
        files.fsync(fd)
    finally:
        files.close(fd)


def write_atomically(
    files: FileSystem, path: Path, temporary: Path, buffers: Iterable[Buffer]
) -> None:
    """Write, fsync, rename, fsync of the directory (K20, K23)."""
    write_new(files, temporary, buffers)
    files.rename(temporary, path)
    files.sync_directory(path.parent)


def identity(status: os.stat_result) -> tuple[int, int]:
    """What tells two files apart: device and inode."""
    return status.st_dev, status.st_ino


def lstat(path: Path) -> os.stat_result | None:
    """Status of the name itself, None where there is none."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def open_to_read(path: Path) -> int:
    """Open a regular file, as a descriptor; raises OSError for anything else, without waiting."""
    # Opening a pipe would wait for a writer; O_NONBLOCK changes nothing for a regular file.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextlib.contextmanager
def open_shared(path: Path) -> Iterator[int]:
    """Open a regular file for reading under a shared flock (K14), as a descriptor.

    The writer patches only files that no reader has locked, and a file is patched only after it
    lost the name; so a lock on the file that still has the name is a lock on a complete file.
    Waits for the lock. Raises OSError.
    """
    while True:
        fd = open_to_read(path)
        try:
            _lock_shared(fd, path)
            if identity(os.stat(path)) == identity(os.fstat(fd)):
                yield fd
                return
        finally:
            os.close(fd)


def _lock_shared(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("%s is locked by another process; waiting until it lets go", path)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
