"""Frames between the SVD pool and its worker processes (numerics.md N29). Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"YETOISO1"
VERSION = 1
FLATTEN = 1
"""The only request code."""

HEADER = struct.Struct("<8sIIQQQQ")
HEADER_BYTES = HEADER.size

MAX_PAYLOAD = 2 * 1024**3
"""Bytes of the largest matrix."""
MAX_DIAGNOSTIC_SENT = 4096
MAX_DIAGNOSTIC_READ = 65536


class Status(IntEnum):
    """Codes of a response."""

    OK = 0
    MALFORMED = 1
    VERSION = 2
    SHAPE = 3
    LENGTH = 4
    NON_FINITE_INPUT = 5
    COMPUTE = 6
    NON_FINITE_OUTPUT = 7
    TOO_LARGE = 8


@dataclass(frozen=True, slots=True)
class Header:
    """The 48 bytes before every payload, little-endian.

    Attributes:
        code: request code, or status of a response.
        request_id: counts from 1 for each worker; echoed.
        rows: of the matrix; echoed.
        cols: of the matrix; echoed.
        payload_bytes: what follows.
        magic: ASCII `YETOISO1`.
        version: 1.
    """

    code: int
    request_id: int
    rows: int
    cols: int
    payload_bytes: int
    magic: bytes = MAGIC
    version: int = VERSION

    def pack(self) -> bytes:
        """The 48 bytes."""
        return HEADER.pack(
            self.magic,
            self.version,
            self.code,
            self.request_id,
            self.rows,
            self.cols,
            self.payload_bytes,
        )


def unpack_header(data: bytes | bytearray) -> Header:
    """Read 48 bytes; nothing is checked."""
    magic, version, code, request_id, rows, cols, payload_bytes = HEADER.unpack(data)
    return Header(code, request_id, rows, cols, payload_bytes, magic, version)


@dataclass(frozen=True, slots=True)
class Complaint:
    """Why a frame is refused."""

    status: Status
    text: str


def check_request(header: Header) -> Complaint | None:
    """What is wrong with a request's header, None if nothing (N29); the payload is complete."""
    if header.magic != MAGIC:
        return Complaint(Status.MALFORMED, f"magic is {header.magic!r}")
    if header.version != VERSION or header.code != FLATTEN:
        return Complaint(
            Status.VERSION, f"version {header.version}, request code {header.code}, known: 1, 1"
        )
    expected = 4 * header.rows * header.cols
    if expected == 0 or expected >= 2**64:
        return Complaint(Status.SHAPE, f"a matrix of {header.rows} x {header.cols}")
    if header.payload_bytes != expected:
        return Complaint(
            Status.LENGTH,
            f"{header.payload_bytes} payload bytes for {header.rows} x {header.cols}, "
            f"expected {expected}",
        )
    return None


def check_response(request: Header, response: Header) -> str | None:
    """What is wrong with a response's header before its payload is read, None if nothing (N30)."""
    if response.magic != MAGIC or response.version != VERSION:
        return f"answered with magic {response.magic!r} and version {response.version}"
    if response.request_id != request.request_id:
        return f"answered request {response.request_id} instead of {request.request_id}"
    if response.code != Status.OK:
        if response.payload_bytes > MAX_DIAGNOSTIC_READ:
            return f"sent a diagnostic of {response.payload_bytes} bytes"
        return None
    if (response.rows, response.cols) != (request.rows, request.cols):
        return (
            f"answered a matrix of {request.rows} x {request.cols} "
            f"with one of {response.rows} x {response.cols}"
        )
    if response.payload_bytes != request.payload_bytes:
        return f"answered {request.payload_bytes} bytes with {response.payload_bytes}"
    return None


def clip_diagnostic(text: str) -> bytes:
    """UTF-8 of `text`, at most 4,096 bytes, cut at a code-point boundary."""
    raw = text.encode("utf-8", "replace")[:MAX_DIAGNOSTIC_SENT]
    return raw.decode("utf-8", "ignore").encode()
