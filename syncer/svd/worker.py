"""`python -m syncer.svd.worker --device DEV`: flattens matrices for the SVD pool (N28 to N30).

Reads frames from stdin and answers on stdout until stdin ends. Exit codes: 0 after the end of input
at a frame boundary, 2 after a truncated or oversized frame.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from io import FileIO

import numpy as np
import torch
from numpy.typing import NDArray

from syncer.svd.flatten import flatten_matrix
from syncer.svd.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Complaint,
    Header,
    Status,
    check_request,
    clip_diagnostic,
    unpack_header,
)
from syncer.svd.pipes import read_into, write_all

Floats = NDArray[np.float32]
Flatten = Callable[[Floats], Floats]


def main() -> int:
    """Serve until the end of input."""
    parser = argparse.ArgumentParser(prog="python -m syncer.svd.worker", description=__doc__)
    parser.add_argument("--device", required=True, help="torch device the SVD runs on")
    parser.add_argument("--rank-cutoff", type=float, help="relative rank cut-off (N13)")
    arguments = parser.parse_args()
    source, sink = _own_pipes()
    return serve(source, sink, _flattener(arguments.device, arguments.rank_cutoff))


def serve(source: FileIO, sink: FileIO, flatten: Flatten) -> int:
    """Answer frame after frame; returns the exit code (N30)."""
    head = bytearray(HEADER_BYTES)
    while True:
        got = read_into(source, memoryview(head))
        if got == 0:
            return 0
        if got < HEADER_BYTES:
            _complain(sink, None, Complaint(Status.MALFORMED, f"header ends after {got} bytes"))
            return 2
        header = unpack_header(head)
        if header.payload_bytes > MAX_PAYLOAD:
            text = f"payload of {header.payload_bytes} bytes, at most {MAX_PAYLOAD}"
            _complain(sink, header, Complaint(Status.TOO_LARGE, text))
            return 2
        payload = np.empty(header.payload_bytes, np.uint8)
        got = read_into(source, payload.data)
        if got < header.payload_bytes:
            text = f"payload ends after {got} of {header.payload_bytes} bytes"
            _complain(sink, header, Complaint(Status.LENGTH, text))
            return 2
        answer = check_request(header) or _answer(header, payload.view(np.float32), flatten)
        if isinstance(answer, Complaint):
            _complain(sink, header, answer)
        else:
            response = Header(
                Status.OK, header.request_id, header.rows, header.cols, header.payload_bytes
            )
            write_all(sink, response.pack())
            write_all(sink, answer.reshape(-1).view(np.uint8).data)


def _answer(header: Header, values: Floats, flatten: Flatten) -> Floats | Complaint:
    if not np.isfinite(values).all():
        return Complaint(Status.NON_FINITE_INPUT, "the matrix has a value that is not finite")
    try:
        flat = flatten(values.reshape(header.rows, header.cols))
    except (RuntimeError, MemoryError) as error:  # torch's errors are RuntimeErrors
        return Complaint(Status.COMPUTE, f"{type(error).__name__}: {error}")
    if not np.isfinite(flat).all():
        return Complaint(Status.NON_FINITE_OUTPUT, "the result has a value that is not finite")
    return flat


def _complain(sink: FileIO, header: Header | None, complaint: Complaint) -> None:
    text = clip_diagnostic(complaint.text)
    echoed = header or Header(0, 0, 0, 0, 0)
    response = Header(complaint.status, echoed.request_id, echoed.rows, echoed.cols, len(text))
    write_all(sink, response.pack() + text)


def _flattener(device: str, rank_cutoff: float | None) -> Flatten:
    target = torch.device(device)

    def flatten(matrix: Floats) -> Floats:
        flat = flatten_matrix(torch.from_numpy(matrix).to(target), rank_cutoff)
        values: Floats = flat.cpu().numpy()
        return values

    return flatten


def _own_pipes() -> tuple[FileIO, FileIO]:
    """stdin and stdout for frames alone: whatever a library prints goes to stderr."""
    source = FileIO(os.dup(sys.stdin.fileno()), "rb")
    sink = FileIO(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return source, sink


if __name__ == "__main__":
    sys.exit(main())
