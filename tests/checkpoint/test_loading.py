"""Loading several fragments in one thread gives what reading them one by one gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.blake2b import LANES
from checkpoint.codec import PIECE_BYTES, read_header, read_structure, scan_fragment
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.loading import LANES_FROM_BYTES, grouped, load_all, load_group
from checkpoint.snapshot import FragmentState, Snapshot
from tests.checkpoint.builders import MemorySource, cut, encode

NUMELS = (1, 300_000, 131_071, 40)
"""Sections of 24 bytes to 2.4 MB: some end within the first piece, one takes three."""
MIB = 1 << 20


def file_of(numels: tuple[int, ...]) -> MemorySource:
    return MemorySource(encode(cut(len(numels), numels)))


def test_k15_a_group_is_read_as_its_fragments_are() -> None:
    source = file_of(NUMELS)
    heads = read_structure(source, read_header(source)).fragments
    expected = cut(len(NUMELS), NUMELS).fragments
    for group in ([0, 1, 2, 3], [3, 1], [2]):
        loaded = load_group(source, [heads[index] for index in group])
        for index, fragment in zip(group, loaded, strict=True):
            assert fragment.digest == scan_fragment(source, heads[index]).digest
            assert fragment.non_finite is None
            assert fragment.state.version == expected[index].version
            assert torch.equal(fragment.state.params, expected[index].params)
            assert torch.equal(fragment.state.momentum, expected[index].momentum)


@pytest.mark.parametrize("half", ["params", "momentum"])
@pytest.mark.parametrize("at", [0, (PIECE_BYTES - 16) // 4 - 1, (PIECE_BYTES - 16) // 4, 299_999])
def test_k6_a_bad_value_is_found_in_any_piece(half: str, at: int) -> None:
    snapshot = cut(len(NUMELS), NUMELS)
    fragments = list(snapshot.fragments)
    values = {"params": fragments[1].params.clone(), "momentum": fragments[1].momentum.clone()}
    values[half][at] = float("inf")
    fragments[1] = FragmentState(fragments[1].version, values["params"], values["momentum"])
    source = MemorySource(encode(Snapshot(0, b"f" * 32, b"c" * 32, 4, tuple(fragments), {})))
    heads = read_structure(source, read_header(source)).fragments
    found = [fragment.non_finite for fragment in load_group(source, heads)]
    assert found == [None, half, None, None]


def test_a_file_of_many_lanes_is_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough for the lanes, on one core as on many."""
    numels = (700_000, 900_000, 5, 800_000, 600_000)
    source = file_of(numels)
    structure = read_structure(source, read_header(source))
    assert structure.size > LANES_FROM_BYTES
    digests = [scan_fragment(source, head).digest for head in structure.fragments]
    expected = cut(len(numels), numels).fragments
    for cores in (1, 2, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        loaded = load_all(source, structure)
        assert [fragment.digest for fragment in loaded] == digests
        for fragment, state in zip(loaded, expected, strict=True):
            assert torch.equal(fragment.state.params, state.params)
            assert torch.equal(fragment.state.momentum, state.momentum)


def test_a_file_that_ends_early_is_truncated() -> None:
    source = file_of(NUMELS)
    heads = read_structure(source, read_header(source)).fragments
    short = MemorySource(encode(cut(len(NUMELS), NUMELS))[:-100_000])
    with pytest.raises(CheckpointRefused) as refused:
        load_group(short, heads)
    assert refused.value.word is Reason.TRUNCATED


@given(
    sizes=st.lists(st.integers(24, 64 * MIB), min_size=1, max_size=40),
    cores=st.integers(1, 64),
)
def test_groups_hold_every_section_once(sizes: list[int], cores: int) -> None:
    groups = grouped(sizes, cores)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        assert len(group) <= LANES
        if len(group) > 1:
            held = [sizes[index] for index in group]
            assert sum(held) >= LANES_FROM_BYTES
            assert sum(held) >= 0.4 * LANES * max(held)


@pytest.mark.parametrize(
    ("sizes", "cores", "together"),
    [
        ([64 * MIB] * 16, 2, 4),  # fewer cores than fragments: full lanes
        ([64 * MIB] * 16, 8, 2),
        ([64 * MIB] * 16, 16, 1),  # a core for each
        ([MIB] * 16, 2, 1),  # small
        ([900 * MIB, MIB, MIB, MIB], 1, 1),  # one that the others would wait for
    ],
)
def test_lanes_are_used_where_they_pay(sizes: list[int], cores: int, together: int) -> None:
    assert {len(group) for group in grouped(sizes, cores)} == {together}


def test_the_values_stay_writable_and_separate() -> None:
    """The coordinator takes the tensors over; they are not views of another fragment's memory."""
    source = file_of(NUMELS)
    loaded = load_group(source, read_structure(source, read_header(source)).fragments)
    before = [fragment.state.momentum.clone() for fragment in loaded]
    for fragment in loaded:
        fragment.state.params.zero_()
    assert all(
        torch.equal(fragment.state.momentum, old)
        for fragment, old in zip(loaded, before, strict=True)
    )
