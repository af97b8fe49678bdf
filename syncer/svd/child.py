"""One SVD worker process seen from the pool: start, one exchange at a time, end (N28 to N30)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from syncer.svd.frames import (
    FLATTEN,
    HEADER_BYTES,
    MAX_PAYLOAD,
    Header,
    Status,
    check_response,
    unpack_header,
)
from syncer.svd.pipes import read_into, write_all

Floats = NDArray[np.float32]

EXIT_WAIT_S = 1.0
"""How long a child whose pipe ended may take to have an exit code to report."""


class ChildFailed(Exception):
    """The worker broke its side of N30; the text says how."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """How to start a worker.

    Attributes:
        python: interpreter.
        device: torch device.
        rank_cutoff: N13, None for the default.
    """

    python: str
    device: str
    rank_cutoff: float | None

    def arguments(self) -> Sequence[str]:
        """The command line of N28."""
        found = [self.python, "-m", "syncer.svd.worker", "--device", self.device]
        if self.rank_cutoff is not None:
            found += ["--rank-cutoff", repr(self.rank_cutoff)]
        return found


class Child:
    """A running worker. `exchange` is for one thread; `kill` and `wait` for any.

    Raises:
        ChildFailed: it could not be started.
    """

    def __init__(self, command: ChildCommand) -> None:
        self.device = command.device
        try:
            self._process = subprocess.Popen(  # noqa: S603  the operator named the interpreter
                command.arguments(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=_environment(os.environ),
                # A Ctrl-C on the terminal is for the syncer, which still needs its workers (C80).
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ChildFailed(f"can't be started: {error}") from error
        self._requests = 0
        # Unbuffered pipes are raw files.
        self._stdin = cast(RawIOBase, self._process.stdin)
        self._stdout = cast(RawIOBase, self._process.stdout)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exchange(self, matrix: Floats) -> Floats:
        """Send one matrix and wait for the answer, however long; `kill` ends the wait.

        Args:
            matrix: f32, shape (rows, cols), contiguous.

        Returns:
            New array of the same shape, finite.

        Raises:
            ChildFailed: an error code, a bad frame, a wrong echo, the end of its pipe.
        """
        if matrix.nbytes > MAX_PAYLOAD:
            raise ChildFailed(f"can't take a matrix of {matrix.nbytes} bytes (N29)")
        self._requests += 1
        rows, cols = matrix.shape
        request = Header(FLATTEN, self._requests, rows, cols, matrix.nbytes)
        try:
            write_all(self._stdin, request.pack())
            write_all(self._stdin, matrix.reshape(-1).view(np.uint8).data)
        except BrokenPipeError:
            # It may have said why before it went: its error frame is still in the pipe.
            pass
        except OSError as error:
            raise ChildFailed(f"can't be written to: {error}") from error
        try:
            return self._receive(request).reshape(rows, cols)
        except OSError as error:
            raise ChildFailed(f"can't be read from: {error}") from error

    def kill(self) -> None:
        """End it at once, stopped or not."""
        self._process.kill()

    def wait(self) -> str:
        """Block until it has ended; how, in words."""
        return _ending(self._process.wait())

    def close_pipes(self) -> None:
        """After its end, when no thread uses the pipes any more."""
        self._stdin.close()
        self._stdout.close()

    def _receive(self, request: Header) -> Floats:
        head = bytearray(HEADER_BYTES)
        self._read(memoryview(head))
        response = unpack_header(head)
        problem = check_response(request, response)
        if problem is not None:
            raise ChildFailed(problem)
        payload = np.empty(response.payload_bytes, np.uint8)
        self._read(payload.data)
        if response.code != Status.OK:
            text = payload.tobytes().decode("utf-8", "replace")
            raise ChildFailed(f"answered with error {response.code}: {text}")
        values = payload.view(np.float32)
        if not np.isfinite(values).all():
            raise ChildFailed("answered with a value that is not finite")
        return values

    def _read(self, target: memoryview) -> None:
        got = read_into(self._stdout, target)
        if got < len(target):
            raise ChildFailed(self._silence(got, len(target)))

    def _silence(self, got: int, expected: int) -> str:
        try:
            ending = _ending(self._process.wait(EXIT_WAIT_S))
        except subprocess.TimeoutExpired:
            ending = "closed its pipe"
        return ending if got == 0 else f"{ending} after {got} of {expected} bytes"


def _environment(inherited: Mapping[str, str]) -> Mapping[str, str]:
    """The child finds this very package, whatever directory the syncer was started in."""
    root = str(Path(__file__).resolve().parents[2])
    known = inherited.get("PYTHONPATH")
    path = root if not known else os.pathsep.join((root, known))
    return {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"was killed by {name}"
