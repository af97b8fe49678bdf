"""The durable store of one checkpoint path: ownership, presence, writing (K7 to K15, K20, K22).

Steps of a write, as K11 and K12 number them:

    F1  all sections into a new P.tmp       S1  or: the changed sections into the old spare P.tmp
    F2  fsync P.tmp
    F3  P.sums.tmp written, fsynced, renamed to P.sums: entries of the old and the new file
    F4  P.prev becomes a second name of P
    F5  P.tmp renamed to P
    F6  fsync of the directory              from here on the step is durable (K10)
    F7  P.prev renamed to P.tmp             the old file is the next spare
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkpoint.codec import digest_buffers, fragment_buffers
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import (
    NO_LINKS,
    NO_LOCKS,
    FileSystem,
    identity,
    lstat,
    write_all,
    write_atomically,
    write_new,
)
from checkpoint.format import encode_header, encode_tail, fragment_offsets, version_at
from checkpoint.marker import encode_marker
from checkpoint.names import Names
from checkpoint.resume import ResumeFile, load_resume_file
from checkpoint.snapshot import Snapshot
from checkpoint.sums import FragmentSum, SumsEntry, encode_sums

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Written:
    """A complete file that this process wrote or loaded: which file it is, and what it holds."""

    identity: tuple[int, int]
    entry: SumsEntry


class CheckpointStore:
    """Owner of P and its adjacent names for the life of a syncer.

    Every method blocks on the disk, so call them in worker threads; one at a time, in the order
    acquire, check_presence, load (with --resume), clean_leftovers, then saves. Start refusals are
    `CheckpointRefused`; a write that fails raises OSError, leaves the file at P intact, and makes
    the next save a full write (C35: call `save` again).
    """

    def __init__(self, path: Path | str, files: FileSystem | None = None) -> None:
        self.names = Names(Path(path))
        self._files = files or FileSystem()
        self._lock_fd: int | None = None
        self._links = True
        self._locks = True
        # The files that P may name, oldest first: more than one only after F5 or F6 failed.
        self._at_path: tuple[_Written, ...] = ()
        self._current: _Written | None = None
        self._spare: _Written | None = None

    # -- ownership and start ---------------------------------------------------------------------

    def acquire(self) -> None:
        """Take `P.lock` until `release`, without waiting (K8).

        Raises:
            CheckpointRefused: `directory` or `locked`.
        """
        names = self.names
        if names.checkpoint.name in ("", ".."):
            raise CheckpointRefused(
                Reason.DIRECTORY,
                f"{names.checkpoint} is not a file name; give another --checkpoint-path",
            )
        try:
            fd = os.open(names.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointRefused(
                Reason.DIRECTORY,
                f"cannot open {names.lock}: {error.strerror}; create {names.directory} with write "
                "permission, or give another --checkpoint-path",
            ) from error
        try:
            locked = self._files.try_lock(fd)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(fd)
                raise CheckpointRefused(
                    Reason.LOCKED, f"cannot lock {names.lock}: {error}"
                ) from error
            logger.warning(
                "%s: this file system has no locks; nothing keeps a second syncer away from %s",
                names.lock,
                names.checkpoint,
            )
            self._locks = False
            locked = True
        if not locked:
            os.close(fd)
            raise CheckpointRefused(
                Reason.LOCKED,
                f"another process owns {names.checkpoint} (it holds {names.lock}); stop it, or "
                "give another --checkpoint-path",
            )
        self._lock_fd = fd
        if not os.access(names.directory, os.W_OK | os.X_OK):
            self.release()
            raise CheckpointRefused(
                Reason.DIRECTORY,
                f"{names.directory} is not writable; change its permissions, or give another "
                "--checkpoint-path",
            )

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def check_presence(self, resume: bool) -> None:
        """Refuse what must not be at P when a run starts (K9); changes nothing.

        Raises:
            CheckpointRefused: `checkpoint-present`, `checkpoint-missing`, `not-a-file` or
                `previous-only`.
        """
        names = self.names
        status = lstat(names.checkpoint)
        if status is None:
            if lstat(names.previous) is not None:
                raise CheckpointRefused(
                    Reason.PREVIOUS_ONLY,
                    f"{names.checkpoint} is missing but {names.previous} is there; someone took "
                    f"the checkpoint away. To go on from it: mv -- {names.previous} "
                    f"{names.checkpoint} and start with --resume; else move it elsewhere",
                )
            if resume:
                raise CheckpointRefused(
                    Reason.MISSING,
                    f"--resume needs a checkpoint and {names.checkpoint} does not exist; start "
                    "without --resume, or give its --checkpoint-path",
                )
        elif not resume:
            raise CheckpointRefused(
                Reason.PRESENT,
                f"{names.checkpoint} exists; continue it with --resume, or move the file away "
                "(or give another --checkpoint-path) to start anew",
            )
        elif not stat.S_ISREG(status.st_mode):
            raise CheckpointRefused(
                Reason.NOT_A_FILE,
                f"{names.checkpoint} is not a regular file; --resume needs the checkpoint itself",
            )

    def load(self, expected_backend: int, total_steps: int | None) -> ResumeFile:
        """Read P and apply K16; nothing is installed yet (K17). Changes nothing on disk.

        Raises:
            CheckpointRefused: a word of K19, or `unreadable`.
        """
        loaded = load_resume_file(self.names, expected_backend, total_steps)
        self._at_path = (_Written(loaded.identity, loaded.entry),)
        return loaded

    def clean_leftovers(self) -> None:
        """Remove what an earlier process left beside P (K9), after presence and load passed.

        Raises:
            CheckpointRefused: `leftover`, when something cannot be removed.
        """
        names = self.names
        stale = [names.spare, names.previous, names.sums_temporary, names.marker_temporary]
        if lstat(names.checkpoint) is None:
            stale.append(names.sums)
        try:
            removed = [path for path in stale if self._files.unlink(path)]
            if removed:
                self._files.sync_directory(names.directory)
        except OSError as error:
            raise CheckpointRefused(
                Reason.LEFTOVER, f"cannot remove a leftover of an earlier run: {error}"
            ) from error

    # -- writing ---------------------------------------------------------------------------------

    def save(
        self,
        snapshot: Snapshot,
        *,
        patch: bool,
        last: bool,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        """Make `snapshot` the durable checkpoint (K10); on return it survives a power loss.

        Args:
            patch: the write may rewrite only what changed in the spare (K12, K13).
            last: terminal or cutoff write: no spare is left behind (K14).
            before_publish: called right before the new file takes the name P (C40: the tape's
                fsync). What it raises comes out of `save`, and P stays the old file.

        Raises:
            OSError: the write failed; the next save is a full write.
        """
        _check_cut(snapshot)
        spare, self._spare = self._spare, None
        current, self._current = self._current, None
        self._check_path_is_ours()
        written = self._write_spare(snapshot, spare if patch else None)
        self._write_sums(written.entry)
        linked = self._link_previous()
        if before_publish is not None:
            before_publish()
        self._publish(written)
        if linked and last:
            self._files.unlink(self.names.previous)
            self._files.sync_directory(self.names.directory)
        elif linked:
            self._files.rename(self.names.previous, self.names.spare)
            self._spare = current
        self._current = written

    def _check_path_is_ours(self) -> None:
        """A file at P that this process neither loaded nor wrote is not ours to replace."""
        status = lstat(self.names.checkpoint)
        if status is None:
            return
        known = [written.identity for written in self._at_path]
        if identity(status) not in known:
            raise FileExistsError(
                errno.EEXIST,
                "another program put a file here while the run went on; move it away",
                str(self.names.checkpoint),
            )
        # A newer file than the one seen never got the name; an older one may come back in a crash.
        self._at_path = self._at_path[: known.index(identity(status)) + 1]

    def _write_spare(self, snapshot: Snapshot, spare: _Written | None) -> _Written:
        """F1 and F2, or S1 and F2 when the spare may be patched."""
        fd = self._open_patchable(snapshot, spare) if spare is not None else None
        if fd is None:
            spare = None
            self._files.unlink(self.names.previous)
            self._files.unlink(self.names.spare)
            fd = self._files.create(self.names.spare)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-sums") as hasher:
                known = () if spare is None else (*self._at_path, spare)
                sums = _sum_fragments(snapshot, known, hasher)
                end = self._write_sections(fd, snapshot, spare)
                self._files.truncate(fd, end)
                self._files.fsync(fd)
                entry = _entry(snapshot, [item.result() for item in sums], end)
            return _Written(identity(os.fstat(fd)), entry)
        finally:
            self._files.close(fd)

    def _open_patchable(self, snapshot: Snapshot, spare: _Written) -> int | None:
        """The spare, locked, when K13 allows to patch it; else None."""
        if not self._locks or not _same_shape(snapshot, spare.entry):
            return None
        try:
            fd = self._files.open(self.names.spare)
        except OSError:
            return None
        status = os.fstat(fd)
        try:
            if (
                identity(status) == spare.identity
                and status.st_nlink == 1
                and status.st_size == spare.entry.bytes
                and self._files.try_lock(fd)
            ):
                return fd
        except OSError as error:
            if error.errno in NO_LOCKS:
                self._locks = False
        self._files.close(fd)
        return None

    def _write_sections(self, fd: int, snapshot: Snapshot, spare: _Written | None) -> int:
        """Header, the fragments that `spare` does not hold at their version, tail."""
        offsets = fragment_offsets([state.params.numel() for state in snapshot.fragments])
        write_all(self._files, fd, 0, [encode_header(snapshot)])
        for index, state in enumerate(snapshot.fragments):
            if spare is None or spare.entry.fragments[index].version != state.version:
                write_all(self._files, fd, offsets[index], fragment_buffers(state))
        return write_all(self._files, fd, offsets[-1], [encode_tail(snapshot)])

    def _write_sums(self, entry: SumsEntry) -> None:
        """F3. Synced with the directory in F6: a lost rename only makes P "unverified"."""
        step = entry.global_step
        others = [item.entry for item in self._at_path if item.entry.global_step != step]
        entries = sorted([*others[-1:], entry], key=lambda item: item.global_step)
        write_new(self._files, self.names.sums_temporary, [encode_sums(entries)])
        self._files.rename(self.names.sums_temporary, self.names.sums)

    def _link_previous(self) -> bool:
        """F4; False where P is absent, or the file system has no hard links."""
        names = self.names
        if not self._links or lstat(names.checkpoint) is None:
            return False
        self._files.unlink(names.previous)
        try:
            self._files.link(names.checkpoint, names.previous)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            logger.warning(
                "%s: this file system has no hard links; every checkpoint is written in full",
                names.directory,
            )
            self._links = False
        return self._links

    def _publish(self, written: _Written) -> None:
        """F5 and F6. An error here leaves open which of the two files has the name P."""
        self._at_path = (*self._at_path, written)
        self._files.rename(self.names.spare, self.names.checkpoint)
        self._files.sync_directory(self.names.directory)
        self._at_path = (written,)

    # -- marker ----------------------------------------------------------------------------------

    def write_marker(self, step: int) -> None:
        """Declare the checkpoint of `step`, just saved, final (K20). Raises OSError."""
        write_atomically(
            self._files, self.names.marker, self.names.marker_temporary, [encode_marker(step)]
        )

    def remove_marker(self) -> None:
        """Remove a stale marker durably; a missing one is fine (K22). Raises OSError."""
        if self._files.unlink(self.names.marker):
            self._files.sync_directory(self.names.directory)


def _check_cut(snapshot: Snapshot) -> None:
    """Never write a file that could not be resumed (K5)."""
    count = len(snapshot.fragments)
    for index, state in enumerate(snapshot.fragments):
        if state.version != version_at(snapshot.global_step, index, count):
            raise ValueError(
                f"fragment {index} has version {state.version} at step {snapshot.global_step}"
            )


def _same_shape(snapshot: Snapshot, entry: SumsEntry) -> bool:
    return [state.params.numel() for state in snapshot.fragments] == [
        fragment.numel for fragment in entry.fragments
    ]


def _sum_fragments(
    snapshot: Snapshot, known: Sequence[_Written], hasher: ThreadPoolExecutor
) -> list[Future[FragmentSum]]:
    """One line per fragment; those at a version that `known` entries hold are not hashed again.

    The hashing runs beside the writing of the same bytes.
    """
    lines = []
    for index, state in enumerate(snapshot.fragments):
        same = (
            item.entry.fragments[index]
            for item in known
            if item.entry.fragments[index].version == state.version
        )
        found = next(same, None)
        if found is None:
            lines.append(hasher.submit(_sum_fragment, snapshot, index))
        else:
            done: Future[FragmentSum] = Future()
            done.set_result(found)
            lines.append(done)
    return lines


def _sum_fragment(snapshot: Snapshot, index: int) -> FragmentSum:
    state = snapshot.fragments[index]
    digest = digest_buffers(*fragment_buffers(state))
    return FragmentSum(state.version, state.params.numel(), digest)


def _entry(snapshot: Snapshot, fragments: Sequence[FragmentSum], size: int) -> SumsEntry:
    return SumsEntry(
        global_step=snapshot.global_step,
        bytes=size,
        header=digest_buffers(encode_header(snapshot)),
        fragments=tuple(fragments),
        tail=digest_buffers(encode_tail(snapshot)),
    )
