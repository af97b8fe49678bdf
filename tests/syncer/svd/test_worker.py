"""The worker's side of N29 and N30, in a real process."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from syncer.svd.frames import FLATTEN, HEADER_BYTES, MAGIC, MAX_PAYLOAD, Header, unpack_header
from syncer.svd.worker import serve

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())["vectors"]
COMMAND = [sys.executable, "-m", "syncer.svd.worker", "--device", "cpu"]


def golden(kind: str) -> list:
    return [v for v in GOLDEN if v["kind"] == kind]


class Worker:
    """A worker process, spoken to in raw bytes."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def receive(self) -> tuple[Header, bytes]:
        assert self.process.stdout is not None
        header = unpack_header(self.process.stdout.read(HEADER_BYTES))
        return header, self.process.stdout.read(header.payload_bytes)

    def flatten(self, matrix: object, request_id: int = 1) -> np.ndarray:
        values = np.array(matrix, np.float32)
        self.send(request(values, request_id))
        header, payload = self.receive()
        assert header == Header(0, request_id, *values.shape, values.nbytes)
        return np.frombuffer(payload, np.float32).reshape(values.shape)

    def end(self) -> tuple[int, bytes]:
        """Close its input; exit code and what it still said."""
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, rest


def request(values: np.ndarray, request_id: int = 1) -> bytes:
    rows, cols = values.shape
    return Header(FLATTEN, request_id, rows, cols, values.nbytes).pack() + values.tobytes()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One process for all tests that it survives."""
    running = Worker()
    yield running
    assert running.end() == (0, b"")


@pytest.mark.parametrize("vector", golden("iso_svd"), ids=lambda v: v["id"])
def test_golden_matrices(worker: Worker, vector: dict) -> None:
    result = worker.flatten(vector["input"]["matrix"])
    assert np.abs(result - np.array(vector["expected"])).max() <= vector["tol"]


@pytest.mark.parametrize("vector", golden("iso_svd_oracle"), ids=lambda v: v["id"])
def test_golden_oracle(worker: Worker, vector: dict) -> None:
    matrix = np.array(vector["input"]["matrix"], np.float64)
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    assert np.allclose(worker.flatten(matrix), s.mean() * u @ vt, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("vector", golden("iso_worker_error"), ids=lambda v: v["id"])
def test_golden_errors(worker: Worker, vector: dict) -> None:
    given = vector["input"]
    payload = bytes(given.get("payload_bytes", 0)) or struct.pack("<2f", 1.0, float("nan"))
    head = Header(FLATTEN, given["request_id"], given["rows"], given["cols"], len(payload))
    worker.send(head.pack() + payload)
    header, text = worker.receive()
    assert (header.code, header.request_id) == (vector["expected"]["status"], given["request_id"])
    assert text.decode()
    assert worker.flatten([[1.0]]).tolist() == [[1.0]]  # "worker continues"


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (Header(FLATTEN, 5, 1, 1, 4, b"GARBAGE!"), 1),
        (Header(FLATTEN, 5, 1, 1, 4, MAGIC, 7), 2),
        (Header(3, 5, 1, 1, 4), 2),
        (Header(FLATTEN, 5, 0, 1, 0), 3),
        (Header(FLATTEN, 5, 2**62, 2**62, 8), 3),
        (Header(FLATTEN, 5, 2, 2, 12), 4),
    ],
)
def test_a_complete_bad_frame_is_answered_and_forgotten(
    worker: Worker, head: Header, code: int
) -> None:
    worker.send(head.pack() + bytes(head.payload_bytes))
    header, text = worker.receive()
    assert (header.code, header.request_id) == (code, 5)
    assert 0 < len(text) <= 4096
    assert worker.flatten([[1.0]]).tolist() == [[1.0]]


def served(data: bytes) -> tuple[int, bytes]:
    """Exit code and output of a worker loop on real pipes, in this process."""
    (source, into), (out_of, sink) = os.pipe(), os.pipe()
    with open(into, "wb") as sender:
        sender.write(data)
    with open(source, "rb", 0) as reader, open(sink, "wb", 0) as writer:
        code = serve(reader, writer, lambda matrix: matrix)
    with open(out_of, "rb") as receiver:
        return code, receiver.read()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"YETOISO1 and no more", 1),
        (Header(FLATTEN, 5, 1, 1, 4).pack() + b"\0\0", 4),
        (Header(FLATTEN, 5, 2**15, 2**14 + 1, MAX_PAYLOAD + 2**17).pack(), 8),
    ],
    ids=["header", "payload", "oversized"],
)
def test_a_truncated_or_oversized_frame_ends_it(data: bytes, code: int) -> None:
    good = request(np.ones((1, 2), np.float32), 4)
    exit_code, output = served(good + data)
    assert exit_code == 2
    assert output[: len(good)] == Header(0, 4, 1, 2, 8).pack() + good[HEADER_BYTES:]
    assert unpack_header(output[len(good) :][:HEADER_BYTES]).code == code


def test_the_end_of_input_at_a_frame_boundary_is_no_fault() -> None:
    assert served(b"") == (0, b"")


def test_a_truncated_frame_ends_the_process_with_2() -> None:
    worker = Worker()
    worker.send(b"YETOISO1")
    exit_code, rest = worker.end()
    assert exit_code == 2
    assert unpack_header(rest[:HEADER_BYTES]).code == 1


def test_the_cutoff_option() -> None:
    """N13."""
    worker = Worker("--rank-cutoff", "0.5")
    assert np.abs(worker.flatten([[3, 0], [0, 1]]) - np.array([[2, 0], [0, 0]])).max() < 1e-6
    assert worker.end()[0] == 0
