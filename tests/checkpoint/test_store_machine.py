"""A store under random saves, faults, readers, restarts and kills: K10 holds at every moment."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpoint.files import FileSystem
from checkpoint.store import CheckpointStore
from checkpoint.sums import read_sums
from tests.checkpoint.builders import cut, encode, hello, same_bits, started
from tests.checkpoint.conftest import MEMORY
from tests.checkpoint.faults import Step, WatchedFiles, in_child, killed_at


class Store(RuleBasedStateMachine):
    """`allowed` are the steps that P may hold now; more than one only after a disturbed save."""

    def __init__(self) -> None:
        super().__init__()
        where = MEMORY if os.access(MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="yeto-store-", dir=where))
        self.path = self.folder / "P"
        self.allowed: set[int | None] = {None}
        self.step = -1
        self.readers: list[tuple[int, bytes]] = []

    @initialize()
    def start(self) -> None:
        self.store = started(self.path)

    def teardown(self) -> None:
        self.store.release()
        for fd, _ in self.readers:
            os.close(fd)
        shutil.rmtree(self.folder)

    def save(self, step: int, *, patch: bool, last: bool) -> None:
        self.store.save(cut(step), patch=patch, last=last)
        self.step = step
        self.allowed = {step}

    @rule(patch=st.booleans(), more=st.integers(1, 4))
    def commit(self, patch: bool, more: int) -> None:
        self.save(self.step + more, patch=patch, last=False)

    @precondition(lambda self: self.step >= 0)
    @rule(patch=st.booleans(), last=st.booleans())
    def save_again(self, patch: bool, last: bool) -> None:
        self.save(self.step, patch=patch, last=last)

    @rule(index=st.integers(0, 40), code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def commit_with_a_fault(self, index: int, code: int) -> None:
        left = [index]

        def watch(_step: Step) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(code, os.strerror(code))

        self.store._files = WatchedFiles(watch)
        try:
            self.save(self.step + 1, patch=True, last=False)
        except OSError:
            self.allowed |= {self.step + 1}
        finally:
            self.store._files = FileSystem()

    @rule(index=st.integers(0, 60), patch=st.booleans())
    def killed(self, index: int, patch: bool) -> None:
        def work() -> None:
            self.store._files = killed_at(index)
            self.save(self.step + 1, patch=patch, last=False)

        in_child(work)
        self.allowed |= {self.step + 1}
        self.restart()

    @rule()
    def restart(self) -> None:
        self.store.release()
        if not self.path.exists():
            assert None in self.allowed
            self.allowed = {None}
            self.step = -1
            self.store = started(self.path)
            return
        self.store = started(self.path, resume=True)
        resumed = self.store.load(0, None)
        assert resumed.verified
        assert resumed.global_step in self.allowed
        assert same_bits(resumed.snapshot_for(hello()), cut(resumed.global_step))
        self.step = resumed.global_step
        self.allowed = {self.step}
        assert {item.name for item in self.folder.iterdir()} == {"P", "P.sums", "P.lock"}

    @precondition(lambda self: self.path.exists() and len(self.readers) < 3)
    @rule()
    def begin_to_read(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        self.readers.append((fd, os.pread(fd, 1 << 16, 0)))

    @precondition(lambda self: self.readers)
    @rule()
    def end_reading(self) -> None:
        fd, data = self.readers.pop(0)
        assert os.pread(fd, 1 << 16, 0) == data
        os.close(fd)

    @invariant()
    def p_is_one_complete_file(self) -> None:
        found = self.path.read_bytes() if self.path.exists() else None
        assert found in {None if step is None else encode(cut(step)) for step in self.allowed}

    @invariant()
    def sums_know_it(self) -> None:
        if self.path.exists():
            known = {entry.global_step for entry in read_sums(self.folder / "P.sums")}
            step = CheckpointStore(self.path).load(0, None).global_step
            assert step in known

    @invariant()
    def readers_see_no_change(self) -> None:
        for fd, data in self.readers:
            assert os.pread(fd, 1 << 16, 0) == data


Store.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
TestStore = Store.TestCase
