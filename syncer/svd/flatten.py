"""The spectral flattening of iso, on one matrix (numerics.md N12, N13)."""

from __future__ import annotations

import torch
from torch import Tensor

F32_EPSILON = 2.0**-23


def flatten_matrix(matrix: Tensor, rank_cutoff: float | None = None) -> Tensor:
    """Give all kept singular directions of `matrix` the mean singular value.

    Args:
        matrix: f32, shape (rows, cols), finite. The SVD runs in f64 on the CPU and in f32 on any
            other device (N14).
        rank_cutoff: directions with s <= cutoff * s_max are dropped; None is
            max(rows, cols) * 2^-23 (N13).

    Returns:
        mean(s) * U_r V_r^T, f32, on the device of `matrix`; a zero matrix unchanged (N12).

    Raises:
        torch.linalg.LinAlgError: the SVD did not converge.
    """
    if not bool(matrix.any()):
        return matrix.clone()
    cutoff = max(matrix.shape) * F32_EPSILON if rank_cutoff is None else rank_cutoff
    exact = matrix.double() if matrix.device.type == "cpu" else matrix
    u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    kept = int((s > cutoff * s[0]).sum())
    flat: Tensor = s.mean() * u[:, :kept] @ vh[:kept]
    return flat.float().contiguous()
