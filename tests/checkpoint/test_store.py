"""K7 to K15, K20 to K23: ownership, presence, patched writes, sums, marker, final-state."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import Buffer, FileSystem, open_shared
from checkpoint.marker import read_marker, write_final_state
from checkpoint.snapshot import FragmentState
from checkpoint.store import CheckpointStore
from checkpoint.sums import parse_sums, read_sums
from tests.checkpoint.builders import NUMELS, cut, encode, started
from tests.checkpoint.faults import NoLinks, NoLocks, Step, WatchedFiles, in_child, steps_of


def refused(store: CheckpointStore, *, resume: bool) -> CheckpointRefused:
    with pytest.raises(CheckpointRefused) as refusal:
        store.check_presence(resume)
    return refusal.value


def save_all(store: CheckpointStore, last_step: int) -> None:
    for step in range(last_step + 1):
        store.save(cut(step), patch=True, last=False)


# -- ownership -------------------------------------------------------------------------------------


def test_k8_two_stores_on_one_path_are_refused(tmp_path: Path) -> None:
    first = started(tmp_path / "P")
    with pytest.raises(CheckpointRefused, match="stop it, or give another") as refusal:
        CheckpointStore(tmp_path / "P").acquire()
    assert refusal.value.word is Reason.LOCKED
    first.release()
    first.release()
    CheckpointStore(tmp_path / "P").acquire()


def test_k8_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    def hold() -> None:
        started(tmp_path / "P")
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(hold))
    started(tmp_path / "P").release()


def test_k8_without_locks_a_warning_and_full_writes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = started(tmp_path / "P", NoLocks())
    assert "no locks" in caplog.text
    save_all(store, 4)
    with (tmp_path / "P.tmp").open("rb") as spare:
        store.save(cut(5), patch=True, last=False)
        assert spare.read() == encode(cut(3))
    assert (tmp_path / "P").read_bytes() == encode(cut(5))


@pytest.mark.parametrize("name", ["missing/P", "P.lock/P", "..", "/"])
def test_directory_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    (tmp_path / "P.lock").touch()
    with pytest.raises(CheckpointRefused, match="another --checkpoint-path") as refusal:
        CheckpointStore(tmp_path / name).acquire()
    assert refusal.value.word is Reason.DIRECTORY


# -- presence --------------------------------------------------------------------------------------


def test_k9_existing_file_without_resume_names_both_ways_out(tmp_path: Path) -> None:
    (tmp_path / "P").write_bytes(b"anything")
    refusal = refused(CheckpointStore(tmp_path / "P"), resume=False)
    assert refusal.word is Reason.PRESENT
    assert "--resume" in refusal.message
    assert "--checkpoint-path" in refusal.message
    assert (tmp_path / "P").read_bytes() == b"anything"


def test_k9_resume_without_a_file(tmp_path: Path) -> None:
    assert refused(CheckpointStore(tmp_path / "P"), resume=True).word is Reason.MISSING


@pytest.mark.parametrize("kind", ["directory", "fifo", "symlink"])
def test_k9_resume_of_something_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "P"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    assert refused(CheckpointStore(path), resume=True).word is Reason.NOT_A_FILE
    assert refused(CheckpointStore(path), resume=False).word is Reason.PRESENT


@pytest.mark.parametrize("resume", [False, True])
def test_k9_only_the_previous_file_is_there(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "P.prev").write_bytes(encode(cut(3)))
    refusal = refused(CheckpointStore(tmp_path / "P"), resume=resume)
    assert refusal.word is Reason.PREVIOUS_ONLY
    assert "mv -- " in refusal.message


def test_k9_leftovers_of_a_fresh_start_are_removed(tmp_path: Path) -> None:
    for name in ("P.tmp", "P.sums", "P.sums.tmp", "P.final.tmp", "P.final", "P.other"):
        (tmp_path / name).touch()
    started(tmp_path / "P")
    assert {path.name for path in tmp_path.iterdir()} == {"P.final", "P.other", "P.lock"}


def test_k9_leftovers_that_cannot_be_removed(tmp_path: Path) -> None:
    (tmp_path / "P.tmp").mkdir()
    with pytest.raises(CheckpointRefused, match="leftover"):
        CheckpointStore(tmp_path / "P").clean_leftovers()


def test_a_bare_name_means_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_all(started(Path("P")), 3)
    assert {path.name for path in tmp_path.iterdir()} == {"P", "P.tmp", "P.sums", "P.lock"}


# -- writing ---------------------------------------------------------------------------------------


def test_k11_steps_of_a_full_write(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    save_all(store, 3)

    def work(files: FileSystem) -> None:
        store._files = files
        store.save(cut(4), patch=False, last=False)

    order = [
        (operation, name)
        for phase, operation, name in steps_of(work)
        if phase == "after" and operation != "unlink"
    ]
    assert [step for step in order if step[0] != "pwrite"] == [
        ("create", "P.tmp"),
        ("truncate", "P.tmp"),
        ("fsync", "P.tmp"),
        ("create", "P.sums.tmp"),
        ("fsync", "P.sums.tmp"),
        ("rename", "P.sums"),
        ("link", "P.prev"),
        ("rename", "P"),
        ("sync_directory", ""),
        ("rename", "P.tmp"),
    ]


class Counting(FileSystem):
    """Counts bytes by offset."""

    def __init__(self) -> None:
        self.written: Counter[int] = Counter()

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        self.written[offset] += len(data)
        return super().pwrite(fd, data, offset)


def test_k12_steady_state_writes_two_fragments(tmp_path: Path) -> None:
    numels = (1000,) * 16
    store = started(tmp_path / "P")
    for step in range(4):
        store.save(cut(step, numels), patch=True, last=False)
    for step in range(4, 40):
        store._files = counting = Counting()
        store.save(cut(step, numels), patch=True, last=False)
        assert (tmp_path / "P").read_bytes() == encode(cut(step, numels))
        sums = len((tmp_path / "P.sums").read_bytes())
        tail = 4 + 28 * min(step, 4) + 68
        assert sum(counting.written.values()) == 2 * (16 + 8000) + 49 + tail + sums


def test_k12_a_shorter_ledger_truncates(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    for step in (4, 5, 0, 1):  # the ledger of `cut` shrinks at the third
        store.save(cut(step), patch=True, last=False)
        assert (tmp_path / "P").read_bytes() == encode(cut(step))


@pytest.mark.parametrize("why", ["linked", "replaced", "resized", "removed", "read"])
def test_k13_spares_that_may_not_be_patched(tmp_path: Path, why: str) -> None:
    store = started(tmp_path / "P")
    save_all(store, 4)
    spare = tmp_path / "P.tmp"
    before = encode(cut(3))
    assert spare.read_bytes() == before
    held = os.open(spare, os.O_RDONLY)
    if why == "linked":
        os.link(spare, tmp_path / "backup")
    elif why == "replaced":
        spare.unlink()
        spare.write_bytes(before)
    elif why == "resized":
        with spare.open("ab") as file:
            file.write(b"x")
    elif why == "removed":
        spare.unlink()
    else:
        fcntl.flock(held, fcntl.LOCK_SH)
    store.save(cut(5), patch=True, last=False)
    assert (tmp_path / "P").read_bytes() == encode(cut(5))
    assert os.fstat(held).st_ino != (tmp_path / "P").stat().st_ino
    assert os.pread(held, len(before), 0) == before
    os.close(held)


def test_k13_a_resumed_file_is_never_patched(tmp_path: Path) -> None:
    first = started(tmp_path / "P")
    save_all(first, 3)
    first.release()
    with (tmp_path / "P").open("rb") as held:
        store = started(tmp_path / "P", resume=True)
        for step in range(4, 8):
            store.save(cut(step), patch=True, last=False)
        assert held.read() == encode(cut(3))


def test_k14_a_reader_keeps_its_file(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    save_all(store, 4)
    with open_shared(tmp_path / "P") as fd:
        for step in range(5, 9):
            store.save(cut(step), patch=True, last=False)
            assert os.pread(fd, 10_000, 0) == encode(cut(4))
    assert (tmp_path / "P").read_bytes() == encode(cut(8))


def test_k14_a_reader_that_waited_reads_the_file_that_has_the_name(tmp_path: Path) -> None:
    """It opened a file that the writer already patches: by then another one is at P."""
    (tmp_path / "P").write_bytes(b"old")
    writer = os.open(tmp_path / "P", os.O_RDWR)
    fcntl.flock(writer, fcntl.LOCK_EX)
    found: list[bytes] = []

    def read() -> None:
        with open_shared(tmp_path / "P") as fd:
            found.append(os.read(fd, 10))

    reader = threading.Thread(target=read)
    reader.start()
    (tmp_path / "next").write_bytes(b"new")
    os.rename(tmp_path / "next", tmp_path / "P")
    os.close(writer)
    reader.join(timeout=30)
    assert found == [b"new"]


def test_k14_the_last_write_leaves_no_spare(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    save_all(store, 4)
    store.save(cut(4), patch=False, last=True)
    assert {path.name for path in tmp_path.iterdir()} == {"P", "P.sums", "P.lock"}


def test_k11_without_hard_links_every_write_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = started(tmp_path / "P", NoLinks())
    for step in range(5):
        store.save(cut(step), patch=True, last=step == 4)
        assert (tmp_path / "P").read_bytes() == encode(cut(step))
        assert {path.name for path in tmp_path.iterdir()} == {"P", "P.sums", "P.lock"}
    assert caplog.text.count("no hard links") == 1


def test_the_tape_is_synced_right_before_the_rename(tmp_path: Path) -> None:
    """C40; and when that fails the old file stays and the next save goes on."""
    store = started(tmp_path / "P")
    save_all(store, 3)
    seen: list[Step] = []
    store._files = WatchedFiles(seen.append)
    store.save(cut(4), patch=True, last=False, before_publish=lambda: seen.append(("tape", "", "")))
    at = seen.index(("tape", "", ""))
    assert seen[at - 1 : at + 2] == [
        ("after", "link", "P.prev"),
        ("tape", "", ""),
        ("before", "rename", "P"),
    ]

    def fail() -> None:
        raise RuntimeError("tape")

    with pytest.raises(RuntimeError, match="tape"):
        store.save(cut(5), patch=True, last=False, before_publish=fail)
    assert (tmp_path / "P").read_bytes() == encode(cut(4))
    store.save(cut(5), patch=True, last=False)
    assert (tmp_path / "P").read_bytes() == encode(cut(5))


@pytest.mark.parametrize("saves", [0, 3])
def test_a_foreign_file_at_the_path_is_not_replaced(tmp_path: Path, saves: int) -> None:
    store = started(tmp_path / "P")
    for step in range(saves):
        store.save(cut(step), patch=True, last=False)
    (tmp_path / "mine").write_bytes(b"mine")
    os.rename(tmp_path / "mine", tmp_path / "P")
    with pytest.raises(FileExistsError, match="move it away"):
        store.save(cut(saves), patch=True, last=False)
    assert (tmp_path / "P").read_bytes() == b"mine"
    (tmp_path / "P").unlink()
    store.save(cut(saves), patch=True, last=False)
    assert (tmp_path / "P").read_bytes() == encode(cut(saves))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(7, dtype=torch.float64), torch.zeros(7, 1), torch.zeros(14)[::2], torch.zeros(6)],
)
def test_wrong_tensors_are_our_own_error(tmp_path: Path, tensor: torch.Tensor) -> None:
    store = started(tmp_path / "P")
    snapshot = cut(0)
    broken = (FragmentState(0, tensor, torch.zeros(NUMELS[0])), *snapshot.fragments[1:])
    with pytest.raises(ValueError, match=r"fragment|contiguous"):
        store.save(type(snapshot)(0, b"f" * 32, b"c" * 32, 0, broken, {}), patch=False, last=False)
    assert not (tmp_path / "P").exists()


# -- sums ------------------------------------------------------------------------------------------


def test_k15_sums_hold_the_last_two_steps_oldest_first(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    for step in range(6):
        store.save(cut(step), patch=True, last=False)
        known = [entry.global_step for entry in read_sums(tmp_path / "P.sums")]
        assert known == [step - 1, step][-min(step + 1, 2) :]
        assert store.load(0, None).verified
    store.save(cut(5), patch=False, last=True)
    assert [entry.global_step for entry in read_sums(tmp_path / "P.sums")] == [5]


def test_k15_resume_keeps_the_entry_of_the_old_file(tmp_path: Path) -> None:
    first = started(tmp_path / "P")
    save_all(first, 3)
    first.release()
    store = started(tmp_path / "P", resume=True)
    store.save(cut(4), patch=True, last=False)
    assert [entry.global_step for entry in read_sums(tmp_path / "P.sums")] == [3, 4]


def test_k15_anything_but_exactly_this_is_unreadable(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    save_all(store, 1)
    data = (tmp_path / "P.sums").read_bytes()
    entries = parse_sums(data)
    assert entries is not None
    assert len(entries) == 2
    document = json.loads(data)
    assert parse_sums(json.dumps(document, indent=3).encode()) == entries  # whitespace is free
    first = document["entries"][0]
    for broken in (
        [],
        {**document, "more": 1},
        {**document, "algorithm": "blake2b-256"},
        {**document, "entries": [first] * 2},
        {**document, "entries": [*document["entries"], {**first, "global_step": 9}]},
        {**document, "entries": [{**first, "bytes": True}]},
        {**document, "entries": [{**first, "bytes": -1}]},
        {**document, "entries": [{**first, "tail": first["tail"].upper() + "0"}]},
        {**document, "entries": [{**first, "fragments": {"0": 1}}]},
        {**document, "entries": [{**first, "fragments": [{"version": 0}]}]},
        {**document, "entries": None},
    ):
        assert parse_sums(json.dumps(broken).encode()) is None
    for text in (b"", data[:-9], b"\xff" + data, b"[" * 100_000):
        assert parse_sums(text) is None


# -- marker and final-state ------------------------------------------------------------------------


def test_k20_marker_is_written_and_removed_durably(tmp_path: Path) -> None:
    store = started(tmp_path / "P")

    def write(files: FileSystem) -> None:
        store._files = files
        store.write_marker(12)

    names = [(operation, name) for phase, operation, name in steps_of(write) if phase == "after"]
    assert names[-4:] == [
        ("pwrite", "P.final.tmp"),
        ("fsync", "P.final.tmp"),
        ("rename", "P.final"),
        ("sync_directory", ""),
    ]
    assert (tmp_path / "P.final").read_bytes() == b"YETO_FINAL_V1\nglobal_step=12\n"
    assert read_marker(tmp_path / "P.final") == 12
    store.write_marker(13)
    assert read_marker(tmp_path / "P.final") == 13

    def remove(files: FileSystem) -> None:
        store._files = files
        store.remove_marker()

    assert ("after", "sync_directory", "") in steps_of(remove)
    assert read_marker(tmp_path / "P.final") is None
    assert ("after", "sync_directory", "") not in steps_of(remove)


@pytest.mark.parametrize("content", [b"", b"YETO_FINAL_V1\nglobal_step=1\n" + b"\n" * 5000])
def test_k21_malformed_markers(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    assert read_marker(tmp_path / "m") is None


def test_k23_final_state(tmp_path: Path) -> None:
    path = tmp_path / "final.bin"
    path.write_bytes(b"of an earlier run")
    snapshot = cut(5)
    steps = steps_of(lambda files: write_final_state(path, snapshot, files))
    assert [step[1:] for step in steps if step[0] == "after"][-3:] == [
        ("fsync", "final.bin.tmp"),
        ("rename", "final.bin"),
        ("sync_directory", ""),
    ]
    expected = struct.pack("<I", len(NUMELS)) + b"".join(
        struct.pack(f"<Q{item.params.numel()}f", item.params.numel(), *item.params.tolist())
        for item in snapshot.fragments
    )
    assert path.read_bytes() == expected
    assert {item.name for item in tmp_path.iterdir()} == {"final.bin"}


def test_messages_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "P").mkdir()
    for resume in (True, False):
        refusal = refused(CheckpointStore(tmp_path / "P"), resume=resume)
        assert re.fullmatch(r"[a-z-]+: [^\n]+", str(refusal))
