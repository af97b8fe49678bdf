"""The `scalar` iso backend (id 0): a direct f64 SVD in the calling worker thread (N14)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncer.svd.flatten import flatten_matrix


class ScalarSvd:
    """In-process SVD backend.

    Args:
        rank_cutoff: `--iso-rank-cutoff`, None for the default of N13.
    """

    def __init__(self, rank_cutoff: float | None = None) -> None:
        self._rank_cutoff = rank_cutoff

    def flatten(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Flatten each f32 matrix (N12); results in the same order."""
        return [flatten_matrix(matrix, self._rank_cutoff) for matrix in matrices]
