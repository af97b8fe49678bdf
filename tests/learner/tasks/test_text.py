"""The text of the built-in task: what is read, held out, and dealt to whom."""

from __future__ import annotations

import numpy as np
import pytest

from learner.tasks.base import TaskError
from learner.tasks.text import Corpus, read_text


def numbered_text(count: int) -> np.ndarray:
    """Each position shows in its four bytes, so a window tells where it came from."""
    return np.arange(count, dtype=">u4").view(np.uint8)


def positions(windows: np.ndarray) -> set[int]:
    """Every whole 4-byte number that the windows contain, given that they start anywhere."""
    found = set()
    for window in windows.astype(np.uint8):
        for shift in range(4):
            part = window[shift : shift + (len(window) - shift) // 4 * 4]
            numbers = part.copy().view(">u4")
            if len(numbers) > 2 and (np.diff(numbers.astype(np.int64)) == 1).all():
                found |= set(numbers.tolist())
    return found


def corpus(learner_id: int, *, seed: int = 0, text: np.ndarray | None = None) -> Corpus:
    text = numbered_text(40_000) if text is None else text
    return Corpus(text, seq_len=64, seed=seed, learner_id=learner_id)


def test_the_standard_library_is_large_and_the_same_twice() -> None:
    text = read_text(None)
    assert 5_000_000 < len(text) < 30_000_000
    assert np.array_equal(text, read_text(None))
    assert b"def " in text[:100_000].tobytes()


def test_a_folder_is_read_in_order_of_its_paths(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"2")
    (tmp_path / "a.py").write_bytes(b"1")
    (tmp_path / "c").write_bytes(b"3")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert read_text(tmp_path).tobytes() == b"123"
    assert read_text(tmp_path / "c").tobytes() == b"3"


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(TaskError, match=r"none\.txt"):
        read_text(tmp_path / "none.txt")


def test_learners_share_no_training_text_and_never_see_the_held_out_part() -> None:
    seen = [
        positions(np.concatenate([corpus(i).batch(n, 64) for n in range(20)])) for i in range(8)
    ]
    for i, own in enumerate(seen):
        assert len(own) > 1000
        for other in seen[i + 1 :]:
            assert not own & other
    held_out = positions(corpus(0).held_out(200))
    assert held_out
    assert not held_out & set().union(*seen)


def test_the_held_out_part_is_the_same_for_every_learner_and_seed() -> None:
    one = corpus(0, seed=1).held_out(16)
    other = corpus(2**32 - 1, seed=2).held_out(16)
    assert one.shape == (16, 65)
    assert np.array_equal(one, other)


def test_batches_depend_on_seed_learner_and_position_only() -> None:
    def first(learner_id: int, seed: int, position: int) -> bytes:
        return corpus(learner_id, seed=seed).batch(position, 8).tobytes()

    assert first(1, 5, 3) == first(1, 5, 3)
    assert len({first(1, 5, 3), first(9, 5, 3), first(1, 6, 3), first(1, 5, 4)}) == 4
    assert first(2**32 - 1, 2**63 - 1, 0)


def test_windows_never_cross_into_a_foreign_block() -> None:
    text = numbered_text(40_000)
    block = len(text) // 20
    own = corpus(3, text=text)
    for n in range(20):
        for window in own.batch(n, 64):
            found = positions(window[None])
            assert min(found) * 4 // block == max(found) * 4 // block


@pytest.mark.parametrize("size", [0, 1, 100, 1000])
def test_too_little_text_is_refused_with_a_way_out(size: int) -> None:
    with pytest.raises(TaskError, match="--seq-len"):
        corpus(0, text=numbered_text(1000)[:size])


def test_a_small_file_is_enough_for_small_windows() -> None:
    small = Corpus(numbered_text(500), seq_len=16, seed=0, learner_id=7)
    assert small.batch(0, 4).shape == (4, 17)
    assert small.held_out(4).shape == (4, 17)
