"""Element types of a session, and how many bytes a tensor takes in each (W9, section 4)."""

from __future__ import annotations

from enum import IntEnum

Q4_BLOCK = 256
"""Values in one q4 block (W53)."""
Q4_BLOCK_BYTES = 132
"""Bytes of one q4 block: an f32 scale and 128 bytes of nibbles (W53)."""


class DType(IntEnum):
    """Session dtype codes (W9)."""

    F32 = 1
    BF16 = 2
    Q4 = 3

    @property
    def label(self) -> str:
        """The name used on the command line: f32, bf16 or q4."""
        return self.name.lower()

    @property
    def bulk(self) -> DType:
        """dtype of INIT and BCAST: the session dtype, except q4 -> bf16 (W9)."""
        return DType.BF16 if self is DType.Q4 else self

    def size(self, numel: int) -> int:
        """Bytes of `numel` values in this dtype (section 4)."""
        if self is DType.F32:
            return 4 * numel
        if self is DType.BF16:
            return 2 * numel
        return Q4_BLOCK_BYTES * -(-numel // Q4_BLOCK)
