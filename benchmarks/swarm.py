"""Many light v4 learners in one process, and a syncer process to load with them.

The learners answer each PULL at once with a prepared delta and do nothing else, so that what is
measured is the syncer. They know as much of the protocol as that takes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wire.dtypes import DType
from wire.frames import CHUNK_BYTES, FRAME_BYTES, FRAME_HEADER, MessageType, frame_header
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec
from wire.messages import Hello, InitParams, encode_frame

_PULL = struct.Struct("<IQI")
_PUSH = struct.Struct("<IIQIQQIQ")
_BCAST = struct.Struct("<IQ")
_CHUNK_OF_BCAST = CHUNK_BYTES + FRAME_BYTES + _BCAST.size
_READ_BYTES = 1 << 18
_REGISTERED = select.EPOLLIN


def layout_of(fragments: int, numel: int) -> NamedLayout:
    """`fragments` avg fragments of one tensor each."""
    return NamedLayout(
        tuple(
            NamedFragment(MergeMode.AVG, (TensorSpec(f"w{index}", (numel,)),))
            for index in range(fragments)
        )
    )


class LightLearner:
    """One learner on one socket (S = 0).

    Attributes:
        version: the newest version broadcast to it.
        pulled_at: step -> when its PULL came, for rounds without a broadcast yet.
        latencies: seconds from a round's PULL to its broadcast, in order.
    """

    def __init__(
        self, port: int, learner_id: int, layout: NamedLayout, dtype: DType = DType.F32
    ) -> None:
        self.learner_id = learner_id
        self.layout = layout
        self.dtype = dtype
        self.version = 0
        self.broadcasts = 0
        self.bytes_in = 0
        self.pulled_at: dict[int, float] = {}
        self.latencies: list[float] = []
        self._buffer = bytearray()
        self._skip = 0
        self._local_step = 0
        self._versions = [0] * len(layout)
        self._deltas = [bytes(dtype.size(part.numel)) for part in layout.fragments]
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        generation = int.from_bytes(os.urandom(8), "little") | 1
        fingerprint = layout.fingerprint
        hello = Hello(
            learner_id=learner_id,
            generation=generation,
            dtype=dtype,
            layout=layout.numeric,
            fingerprint=fingerprint,
            contract=fingerprint,
            profile=None,
            num_streams=0,
        )
        self.socket.sendall(encode_frame(hello))

    def send_init(self) -> None:
        """All fragments, zeros."""
        for index, part in enumerate(self.layout.fragments):
            self.socket.sendall(
                encode_frame(InitParams(index, bytes(self.dtype.bulk.size(part.numel))))
            )

    def read(self, limit: int = _READ_BYTES) -> bool:
        """Read once and answer what came; False at the end of the connection."""
        try:
            data = self.socket.recv(limit)
        except ConnectionError:
            return False
        if not data:
            return False
        self.bytes_in += len(data)
        if self._skip:
            if len(data) <= self._skip:
                self._skip -= len(data)
                return True
            data = data[self._skip :]
            self._skip = 0
        self._buffer += data
        self._parse()
        return True

    def _parse(self) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) - at >= FRAME_BYTES:
            _, kind, length = FRAME_HEADER.unpack_from(buffer, at)
            body = at + FRAME_BYTES
            need = length
            if kind == MessageType.CHUNK:
                need = min(length, _CHUNK_OF_BCAST)
            if len(buffer) - body < need:
                break
            if kind == MessageType.PULL_REQ:
                self._answer(*_PULL.unpack_from(buffer, body))
            elif kind == MessageType.CHUNK:
                self._slice(buffer, body)
            at = body + length
            if at > len(buffer):
                self._skip = at - len(buffer)
                at = len(buffer)
        del buffer[:at]

    def _slice(self, buffer: bytearray, at: int) -> None:
        offset = int.from_bytes(buffer[at + 16 : at + 24], "little")
        if offset or buffer[at + CHUNK_BYTES + 4] != MessageType.BCAST_FRAGMENT:
            return
        fragment, version = _BCAST.unpack_from(buffer, at + CHUNK_BYTES + FRAME_BYTES)
        self._versions[fragment] = version
        self.version = max(self.version, version)
        self.broadcasts += 1
        asked = self.pulled_at.pop(version, None)
        if asked is not None:
            self.latencies.append(time.perf_counter() - asked)

    def _answer(self, fragment: int, step: int, attempt: int) -> None:
        self.pulled_at[step] = time.perf_counter()
        self._local_step += 1
        delta = self._deltas[fragment]
        head = _PUSH.pack(
            self.learner_id,
            fragment,
            step,
            attempt,
            self._versions[fragment],
            self._local_step,
            1,
            16,
        )
        frame = frame_header(MessageType.PUSH_FRAGMENT, len(head) + len(delta)) + head
        if len(delta) < 1 << 16:
            self.socket.sendall(frame + delta)
        else:
            self.socket.sendall(frame)
            self.socket.sendall(delta)

    def close(self) -> None:
        self.socket.close()


class Swarm:
    """Learners that are served together in one thread."""

    def __init__(self, learners: Sequence[LightLearner]) -> None:
        self.learners = list(learners)
        self._poll = select.epoll()
        self._by_fd = {learner.socket.fileno(): learner for learner in learners}
        for fd in self._by_fd:
            self._poll.register(fd, _REGISTERED)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Serve for `seconds`, or until `until` says so; returns how long it was."""
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end and not (until is not None and until()):
            for fd, _ in self._poll.poll(min(0.05, end - now)):
                learner = self._by_fd[fd]
                if not learner.read():
                    self._poll.unregister(fd)
        return time.perf_counter() - start

    @property
    def version(self) -> int:
        """The newest version that any of them has seen."""
        return max(learner.version for learner in self.learners)

    def rate(self, seconds: float) -> float:
        """Committed rounds per second, measured over `seconds`."""
        before = self.version
        return (self.version_after(seconds) - before) / self._elapsed

    def version_after(self, seconds: float) -> int:
        """Serve for `seconds`, then the newest version."""
        self._elapsed = self.run(seconds)
        return self.version

    def take_latencies(self) -> list[float]:
        """Latencies of all learners since the last call, seconds."""
        found = [value for learner in self.learners for value in learner.latencies]
        for learner in self.learners:
            learner.latencies.clear()
        return found

    def close(self) -> None:
        self._poll.close()
        for learner in self.learners:
            learner.close()


class SyncerProcess:
    """`yeto-syncer` in a directory of its own, without pacing or periodic checkpoints."""

    def __init__(self, directory: Path, *arguments: str, module: Sequence[str] = ()) -> None:
        self._ready = directory / "ready.json"
        self._ready.unlink(missing_ok=True)
        program = module or (str(Path(sys.executable).parent / "yeto-syncer"),)
        self._log = (directory / "syncer.log").open("ab")
        self.process = subprocess.Popen(
            [
                *program,
                *("--port", "0", "--ready-file", str(self._ready)),
                *("--checkpoint-path", str(directory / "state.ckpt")),
                *("--sync-interval-steps", "0", "--checkpoint-every", "0"),
                *arguments,
            ],
            stderr=self._log,
            stdout=self._log,
            cwd=directory,
        )
        end = time.monotonic() + 60
        while not self._ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((directory / "syncer.log").read_text())
            time.sleep(0.01)
        self.port: int = json.loads(self._ready.read_text())["port"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Two signals end it without waiting for acknowledgements (C81)."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
        try:
            self.process.wait(120)  # it may have a large checkpoint to write
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __enter__(self) -> SyncerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def swarm_of(process: SyncerProcess, learners: int, layout: NamedLayout) -> Swarm:
    """`learners` joined learners; number 0 has sent INIT."""
    made = [LightLearner(process.port, number, layout) for number in range(learners)]
    made[0].send_init()
    return Swarm(made)
