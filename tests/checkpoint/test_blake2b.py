"""K15: the lanes give what hashlib gives, whatever the sizes and the pieces."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpoint.blake2b import BLOCK_BYTES, LANES, SectionDigests, padded_bytes

EDGES = [0, 1, 127, 128, 129, 255, 256, 257, 384, 4096, 5000]


def section(size: int, seed: int) -> NDArray[np.uint8]:
    padded = np.zeros(padded_bytes(size) // 8, np.uint64).view(np.uint8)
    padded[:size] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return padded


def by_hashlib(padded: NDArray[np.uint8], size: int) -> str:
    return hashlib.blake2b(padded[:size].tobytes(), digest_size=16).hexdigest()


@given(
    sizes=st.lists(st.sampled_from(EDGES) | st.integers(0, 3000), min_size=1, max_size=LANES),
    blocks=st.lists(st.integers(1, 12), min_size=1),
    seed=st.integers(0, 99),
)
def test_k15_every_lane_is_blake2b_128(sizes: list[int], blocks: list[int], seed: int) -> None:
    sections = [section(size, seed + lane) for lane, size in enumerate(sizes)]
    digests = SectionDigests(sections, sizes)
    end, turn = 0, 0
    while end < max(sizes) or end == 0:
        end += BLOCK_BYTES * blocks[turn % len(blocks)]
        turn += 1
        digests.advance(end)
    expected = [by_hashlib(s, size) for s, size in zip(sections, sizes, strict=True)]
    assert digests.hexdigests() == expected
    digests.advance(end)  # nothing is hashed twice
    assert digests.hexdigests() == expected


def test_a_digest_needs_all_bytes() -> None:
    digests = SectionDigests([section(10, 0), section(300, 1)], [10, 300])
    digests.advance(256)
    with pytest.raises(ValueError, match="to their end"):
        digests.hexdigests()
    with pytest.raises(ValueError, match="end with a block"):
        digests.advance(300)


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [([], []), ([section(1, 0)] * 5, [1] * 5), ([section(1, 0)], [1, 1]), ([section(1, 0)], [129])],
)
def test_sections_that_do_not_fit_are_refused(sections: list[NDArray[np.uint8]], sizes) -> None:
    with pytest.raises(ValueError, match="section"):
        SectionDigests(sections, sizes)
