"""Frames of the SVD pool (N29)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.svd.frames import (
    FLATTEN,
    HEADER_BYTES,
    MAGIC,
    Header,
    Status,
    check_request,
    check_response,
    clip_diagnostic,
    unpack_header,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())["vectors"]
GOOD = Header(FLATTEN, 9, 2, 3, 24)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("vector", [v for v in GOLDEN if v["kind"] == "iso_header"])
def test_golden_header(vector: dict) -> None:
    given = dict(vector["input"])
    payload = bytes.fromhex(given.pop("payload_hex"))
    header = Header(**given, payload_bytes=len(payload))
    assert (header.pack() + payload).hex() == vector["expected"]
    assert unpack_header(header.pack()) == header


@given(st.builds(Header, u32, u64, u64, u64, u64, st.binary(min_size=8, max_size=8), u32))
def test_headers_survive(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 48
    assert unpack_header(packed) == header


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (Header(FLATTEN, 1, 1, 1, 4, b"YETOISO2"), Status.MALFORMED),
        (Header(FLATTEN, 1, 1, 1, 4, MAGIC, 2), Status.VERSION),
        (Header(2, 1, 1, 1, 4), Status.VERSION),
        (Header(FLATTEN, 1, 0, 1, 0), Status.SHAPE),
        (Header(FLATTEN, 1, 1, 0, 0), Status.SHAPE),
        (Header(FLATTEN, 1, 2**32, 2**30, 4), Status.SHAPE),
        (Header(FLATTEN, 1, 2**63, 2**63, 0), Status.SHAPE),
        (Header(FLATTEN, 1, 2, 3, 20), Status.LENGTH),
    ],
)
def test_bad_requests(header: Header, status: Status) -> None:
    complaint = check_request(header)
    assert complaint is not None
    assert complaint.status is status


def test_a_good_request_passes() -> None:
    assert check_request(GOOD) is None


@pytest.mark.parametrize(
    "answer",
    [
        Header(0, 9, 2, 3, 24, b"yetoiso1"),
        Header(0, 9, 2, 3, 24, MAGIC, 0),
        Header(0, 8, 2, 3, 24),
        Header(0, 9, 3, 2, 24),
        Header(0, 9, 2, 3, 20),
        Header(6, 8, 2, 3, 4),
        Header(6, 9, 2, 3, 65537),
    ],
)
def test_bad_answers(answer: Header) -> None:
    """N30: id, shape and length are echoed; N29: a diagnostic has at most 65,536 bytes."""
    assert check_response(GOOD, answer) is not None


@pytest.mark.parametrize("answer", [Header(0, 9, 2, 3, 24), Header(6, 9, 0, 0, 65536)])
def test_good_answers(answer: Header) -> None:
    assert check_response(GOOD, answer) is None


def test_diagnostics_are_cut_between_characters() -> None:
    raw = clip_diagnostic("€" * 2000)
    assert len(raw) == 4095
    assert raw.decode() == "€" * 1365
