"""K8 section, the crash matrix: a real process killed at every seam of a write, then a resume.

Also power loss (the disk forgets what was not synced), failing operations and torn spares. After
each the run goes on, and its files are byte for byte those of a run that was never disturbed.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoint.errors import CheckpointRefused
from checkpoint.files import FileSystem
from checkpoint.store import CheckpointStore
from checkpoint.sums import read_sums
from tests.checkpoint.builders import cut, encode, hello, same_bits, started
from tests.checkpoint.faults import (
    FullDisk,
    ShortWrites,
    Step,
    WatchedFiles,
    in_child,
    killed_at,
    steps_of,
)

BASE = 5
"""Step of the file at P when the disturbed write begins."""
NEXT = BASE + 1
WRITES = {"full": False, "patched": True}


@dataclass(frozen=True)
class Row:
    """One line of the matrix in docs/durability.md.

    Attributes:
        point: where the process ends.
        seam: (phase, operation, name), and which occurrence of it.
        at_path: step that P holds afterwards, counted from the old one: 0 old, 1 new.
        sums: steps that P.sums knows, counted alike.
        leftovers: adjacent names there beside P, P.sums and P.lock.
    """

    point: str
    seam: Step
    occurrence: int
    at_path: int
    sums: tuple[int, ...]
    leftovers: tuple[str, ...]


def row(
    point: str,
    seam: str,
    at_path: int,
    sums: tuple[int, ...],
    leftovers: str,
    occurrence: int = 0,
) -> Row:
    phase, operation, name = (*seam.split(), "")[:3]
    return Row(point, (phase, operation, name), occurrence, at_path, sums, tuple(leftovers.split()))


def rows(write: str) -> list[Row]:
    """The crash points of a write of step s over s-1; `sums` of the old file is {s-2, s-1}."""
    first = "before pwrite P.tmp" if write == "patched" else "before create P.tmp"
    before = "P.tmp" if write == "patched" else ""
    letter = "S1" if write == "patched" else "F1"
    return [
        row(f"before {letter}", first, 0, (-1, 0), before),
        row(f"during {letter}", "after pwrite P.tmp", 0, (-1, 0), "P.tmp", occurrence=1),
        row(f"after {letter}, before F2", "before fsync P.tmp", 0, (-1, 0), "P.tmp"),
        row("after F2", "after fsync P.tmp", 0, (-1, 0), "P.tmp"),
        row("during F3", "before rename P.sums", 0, (-1, 0), "P.tmp P.sums.tmp"),
        row("after F3", "after rename P.sums", 0, (0, 1), "P.tmp"),
        row("after F4", "after link P.prev", 0, (0, 1), "P.tmp P.prev"),
        row("after F5, before F6", "after rename P", 1, (0, 1), "P.prev"),
        row("after F6", "after sync_directory", 1, (0, 1), "P.prev"),
        row("after F7", "after rename P.tmp", 1, (0, 1), "P.tmp"),
    ]


MATRIX = [(write, item) for write in WRITES for item in rows(write)]


def run_to_base(folder: Path) -> CheckpointStore:
    """A run at BASE, saved at every step, with a spare of its own."""
    store = started(folder / "P")
    for step in range(BASE - 2, BASE + 1):
        store.save(cut(step), patch=True, last=False)
    return store


def save_next(store: CheckpointStore, files: FileSystem, write: str) -> None:
    store._files = files
    store.save(cut(NEXT), patch=WRITES[write], last=False)


def kill_at(folder: Path, write: str, index: int) -> None:
    """Run to BASE, and kill -9 the process at one step of the next save."""

    def work() -> None:
        save_next(run_to_base(folder), killed_at(index), write)

    status = in_child(work)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def beside(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"P", "P.sums", "P.lock"}


def check_resume_and_run_on(folder: Path, allowed: set[int], *, verified: bool = True) -> int:
    """Resume, compare all state with the undisturbed run, go on for three steps."""
    path = folder / "P"
    store = CheckpointStore(path)
    store.acquire()
    store.check_presence(resume=True)
    resumed = store.load(0, None)
    step = resumed.global_step
    assert step in allowed
    assert resumed.verified or not verified
    assert same_bits(resumed.snapshot_for(hello()), cut(step))
    store.clean_leftovers()
    assert beside(folder) == set()
    for later in range(step + 1, step + 4):
        store.save(cut(later), patch=True, last=False)
        assert path.read_bytes() == encode(cut(later))
    store.save(cut(step + 3), patch=False, last=True)
    assert beside(folder) == set()
    assert store.load(0, None).verified
    store.release()
    return step


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """All steps of one undisturbed save, per kind of write."""
    return {write: undisturbed(tmp_path_factory.mktemp(write), write) for write in WRITES}


def undisturbed(folder: Path, write: str) -> list[Step]:
    store = run_to_base(folder)
    found = steps_of(lambda files: save_next(store, files, write))
    store.release()
    return found


@pytest.mark.parametrize(
    ("write", "line"), MATRIX, ids=[f"{write}: {line.point}" for write, line in MATRIX]
)
def test_matrix_row(write: str, line: Row, steps: dict[str, list[Step]], disk_path: Path) -> None:
    at = [index for index, step in enumerate(steps[write]) if step == line.seam]
    kill_at(disk_path, write, at[line.occurrence])
    assert (disk_path / "P").read_bytes() == encode(cut(BASE + line.at_path))
    known = {entry.global_step - BASE for entry in read_sums(disk_path / "P.sums")}
    assert known == set(line.sums)
    assert beside(disk_path) == set(line.leftovers)
    assert check_resume_and_run_on(disk_path, {BASE + line.at_path}) == BASE + line.at_path


@pytest.mark.parametrize("write", WRITES)
def test_killed_at_every_step(write: str, steps: dict[str, list[Step]], tmp_path: Path) -> None:
    for index in range(len(steps[write])):
        folder = tmp_path / str(index)
        folder.mkdir()
        kill_at(folder, write, index)
        check_resume_and_run_on(folder, {BASE, NEXT})


def test_first_write_ever(tmp_path: Path) -> None:
    """Nothing to resume before F5; a fresh start finds the place clean (K9)."""
    folder = tmp_path / "count"
    folder.mkdir()
    store = started(folder / "P")
    all_steps = steps_of(lambda files: _first(store, files))
    for index, step in enumerate(all_steps):
        folder = tmp_path / str(index)
        folder.mkdir()
        store = started(folder / "P")
        status = in_child(lambda store=store, index=index: _first(store, killed_at(index)))  # type: ignore[misc]
        assert os.WIFSIGNALED(status)
        store.release()
        if index >= all_steps.index(("after", "rename", "P")):
            check_resume_and_run_on(folder, {0})
            continue
        assert not (folder / "P").exists(), step
        with pytest.raises(CheckpointRefused, match="checkpoint-missing"):
            CheckpointStore(folder / "P").check_presence(resume=True)
        fresh = started(folder / "P")
        assert {path.name for path in folder.iterdir()} == {"P.lock"}
        _first(fresh, FileSystem())
        assert (folder / "P").read_bytes() == encode(cut(0))
        fresh.release()


def _first(store: CheckpointStore, files: FileSystem) -> None:
    store._files = files
    store.save(cut(0), patch=False, last=False)


@pytest.mark.parametrize("write", WRITES)
def test_terminal_write_killed_at_every_step(write: str, tmp_path: Path) -> None:
    """K14: no spare stays, whatever is killed on the way is cleaned at the next start."""

    def last(store: CheckpointStore, files: FileSystem) -> None:
        store._files = files
        store.save(cut(BASE), patch=WRITES[write], last=True)

    count = tmp_path / "count"
    count.mkdir()
    store = run_to_base(count)
    total = len(steps_of(lambda files: last(store, files)))
    assert beside(count) == set()
    for index in range(total):
        folder = tmp_path / str(index)
        folder.mkdir()
        status = in_child(lambda f=folder, i=index: last(run_to_base(f), killed_at(i)))  # type: ignore[misc]
        assert os.WIFSIGNALED(status)
        check_resume_and_run_on(folder, {BASE})


def test_torn_spare_is_never_read(steps: dict[str, list[Step]], tmp_path: Path) -> None:
    """Pages of a half-patched spare come back old, new or as garbage; K9 removes it unread."""
    rng = random.Random(7)
    middle = [i for i, step in enumerate(steps["patched"]) if step == ("after", "pwrite", "P.tmp")]
    for index in middle:
        folder = tmp_path / str(index)
        folder.mkdir()
        kill_at(folder, "patched", index)
        spare = folder / "P.tmp"
        data = bytearray(spare.read_bytes())
        at = rng.randrange(len(data))
        data[at : at + 64] = rng.randbytes(64)
        spare.write_bytes(data)
        check_resume_and_run_on(folder, {BASE})


# -- power loss ------------------------------------------------------------------------------------


class Disk:
    """What a disk may hold after a power loss.

    Names change in memory at once and on the disk at the next sync of the directory; until then any
    subset of the changes may have reached it. The content of a file is what its last fsync saw;
    content written since may be there, or be torn.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[int, bytes] = {}
        self.durable: dict[str, int] = {}
        self.pending: list[tuple[str, str, int]] = []
        for path in folder.iterdir():
            self.durable[path.name] = path.stat().st_ino
            self.contents[path.stat().st_ino] = path.read_bytes()

    def note(self, step: Step) -> None:
        phase, operation, name = step
        path = self.folder / name
        if phase == "before":
            return
        if operation == "sync_directory":
            self.durable = {item.name: item.stat().st_ino for item in self.folder.iterdir()}
            self.pending = []
        elif operation == "fsync":
            self.contents[path.stat().st_ino] = path.read_bytes()
        elif operation == "unlink":
            self.pending.append(("unlink", name, 0))
        elif operation in ("create", "link", "rename"):
            inode = path.stat().st_ino
            self.pending.append((operation, name, inode))
            if operation == "create":
                self.contents[inode] = b""

    def states(self, live: dict[int, bytes]) -> list[dict[str, bytes]]:
        """Every directory that may be found; `live` is what the files hold in memory."""
        found = []
        for kept in itertools.product((False, True), repeat=len(self.pending)):
            names = dict(self.durable)
            for use, (operation, name, inode) in zip(kept, self.pending, strict=True):
                if use:
                    self._apply(names, operation, name, inode)
            for view in ("synced", "written", "torn"):
                found.append({n: self._content(i, view, live) for n, i in names.items()})
        return found

    def _apply(self, names: dict[str, int], operation: str, name: str, inode: int) -> None:
        if operation == "unlink":
            names.pop(name, None)
            return
        if operation == "rename":
            source = {"P": "P.tmp", "P.sums": "P.sums.tmp", "P.tmp": "P.prev"}[name]
            if names.get(source) == inode:
                del names[source]
        names[name] = inode

    def _content(self, inode: int, view: str, live: dict[int, bytes]) -> bytes:
        synced, written = self.contents[inode], live.get(inode, self.contents[inode])
        if view == "synced" or synced == written:
            return synced
        if view == "written":
            return written
        middle = len(written) // 2
        return written[:middle] + bytes(len(written) - middle)


@pytest.mark.parametrize("write", WRITES)
def test_power_loss_at_every_step(write: str, tmp_path: Path) -> None:
    """K10: whatever subset of unsynced changes survives, P is complete and of step s-1 or s."""
    folder = tmp_path / "run"
    folder.mkdir()
    store = run_to_base(folder)
    disk = Disk(folder)
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    durable = False

    def watch(step: Step) -> None:
        nonlocal durable
        disk.note(step)
        durable = durable or step == ("after", "sync_directory", "")
        live = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}
        for state in disk.states(live):
            assert state["P"] == encode(cut(NEXT)) or (
                not durable and state["P"] == encode(cut(BASE))
            )
            seen.add(tuple(sorted(state.items())))

    save_next(store, WatchedFiles(watch), write)
    store.release()
    assert durable
    after = tmp_path / "after"
    for state in seen:
        after.mkdir()
        for name, content in state:
            (after / name).write_bytes(content)
        store = started(after / "P", resume=True)
        resumed = store.load(0, None)
        assert same_bits(resumed.snapshot_for(hello()), cut(resumed.global_step))
        assert beside(after) == set()
        store.release()
        shutil.rmtree(after)


# -- failing operations ----------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_c35_any_operation_fails_and_is_tried_again(
    write: str, code: int, times: int, steps: dict[str, list[Step]], tmp_path: Path
) -> None:
    """Before an operation it did not happen, after it the error came although it did."""
    for index in range(len(steps[write])):
        folder = tmp_path / str(index)
        folder.mkdir()
        store = run_to_base(folder)
        left = [index]

        def watch(_step: Step, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))

        for _ in range(times):
            left[0] = index
            with pytest.raises(OSError, match=re.escape(os.strerror(code))):
                save_next(store, WatchedFiles(watch), write)
            assert (folder / "P").read_bytes() in (encode(cut(BASE)), encode(cut(NEXT)))
        save_next(store, FileSystem(), write)
        assert (folder / "P").read_bytes() == encode(cut(NEXT))
        assert {entry.global_step for entry in read_sums(folder / "P.sums")} >= {NEXT}
        for later in range(NEXT + 1, NEXT + 4):
            store.save(cut(later), patch=True, last=False)
            assert (folder / "P").read_bytes() == encode(cut(later))
        store.release()
        check_resume_and_run_on(folder, {NEXT + 3})


@pytest.mark.parametrize("write", WRITES)
def test_disk_full_in_the_middle_of_a_write(write: str, tmp_path: Path) -> None:
    store = run_to_base(tmp_path)
    files = FullDisk()
    files.full = True
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            save_next(store, files, write)
        assert (tmp_path / "P").read_bytes() == encode(cut(BASE))
    files.full = False
    save_next(store, files, write)
    assert (tmp_path / "P").read_bytes() == encode(cut(NEXT))
    store.release()
    check_resume_and_run_on(tmp_path, {NEXT})


def test_short_writes_are_continued(tmp_path: Path) -> None:
    store = started(tmp_path / "P", ShortWrites())
    for step in range(5):
        store.save(cut(step), patch=True, last=False)
        assert (tmp_path / "P").read_bytes() == encode(cut(step))
    store.release()
    check_resume_and_run_on(tmp_path, {4})


# -- the document ----------------------------------------------------------------------------------


def test_the_matrix_in_the_docs_is_the_one_that_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "durability.md").read_text()
    table = [
        tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        for line in text.splitlines()
        if re.match(r"\| (full|patched) \|", line)
    ]
    assert table == [document_row(write, line) for write, line in MATRIX]


def document_row(write: str, line: Row) -> tuple[str, ...]:
    names = {-1: "s-2", 0: "s-1", 1: "s"}
    leftovers = ", ".join(f"`{name}`" for name in line.leftovers) or "-"
    sums = ", ".join(names[step] for step in line.sums)
    return (write, line.point, names[line.at_path], sums, leftovers, names[line.at_path])
