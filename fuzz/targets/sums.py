"""The small files beside a checkpoint: integrity sums and the marker (K15, K20, K21)."""

from __future__ import annotations

from checkpoint.marker import encode_marker, parse_marker
from checkpoint.sums import encode_sums, parse_sums


def one_input(data: bytes) -> None:
    """Both readers take any bytes and raise nothing."""
    step = parse_marker(data)
    if step is not None:
        assert 0 <= step < 2**64
        assert parse_marker(encode_marker(step)) == step
    entries = parse_sums(data)
    if entries is not None:
        assert len(entries) <= 2
        assert parse_sums(encode_sums(entries)) == entries
