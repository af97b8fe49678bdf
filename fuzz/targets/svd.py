"""Frames of the SVD pool: the worker's side of the pipe, and the pool's judgement (N29, N30).

Input: the bytes that a worker reads. The matrix is given back as it came.
"""

from __future__ import annotations

import io
from typing import cast

import numpy as np

from syncer.svd.frames import (
    HEADER_BYTES,
    MAX_DIAGNOSTIC_SENT,
    Header,
    Status,
    check_response,
    unpack_header,
)
from syncer.svd.worker import Floats, serve


class _Pipe(io.RawIOBase):
    """One end of a pipe, over bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self.bytes = io.BytesIO(data)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """As a pipe does, in pieces."""
        return self.bytes.readinto(buffer[:4096])

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        """Take everything."""
        return self.bytes.write(data)


def one_input(data: bytes) -> None:
    """Serve the input; every answer must be one that the pool understands."""
    source, sink = _Pipe(data), _Pipe()
    status = serve(cast(io.FileIO, source), cast(io.FileIO, sink), _same)
    answers = _answers(sink.bytes.getvalue())
    at = 0
    for header, payload in answers:
        request = data[at : at + HEADER_BYTES]
        if len(request) < HEADER_BYTES:
            assert (status, header.code) == (2, Status.MALFORMED)
            return
        asked = unpack_header(request)
        at += HEADER_BYTES
        echo = (header.request_id, header.rows, header.cols)
        assert echo == (asked.request_id, asked.rows, asked.cols)
        assert check_response(asked, header) is None
        if header.code == Status.OK:
            assert payload == data[at : at + asked.payload_bytes]
        at += asked.payload_bytes
    assert status == (0 if at == len(data) else 2)


def _answers(output: bytes) -> list[tuple[Header, bytes]]:
    found = []
    while output:
        header = unpack_header(output[:HEADER_BYTES])
        payload = output[HEADER_BYTES:][: header.payload_bytes]
        assert len(payload) == header.payload_bytes
        if header.code != Status.OK:
            assert len(payload) <= MAX_DIAGNOSTIC_SENT
            assert payload.decode()
        found.append((header, payload))
        output = output[HEADER_BYTES + len(payload) :]
    return found


def _same(matrix: Floats) -> Floats:
    return np.ascontiguousarray(matrix)
