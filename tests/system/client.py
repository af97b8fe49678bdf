"""A scripted v4 client on blocking sockets, and a `yeto-syncer` process to talk to.

It shares only the message codecs with the product: sockets, chunks and the order of everything are
its own, so that a test can do what no honest learner does.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from tests.system.zygote import zygote
from wire.dtypes import DType
from wire.frames import CHUNK_HEADER, FRAME_HEADER, MAGIC, MessageType
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec
from wire.messages import (
    Broadcast,
    DataHello,
    ErrorMessage,
    FinalAck,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    Hello,
    InitParams,
    Message,
    PullRequest,
    PushFragment,
    Shutdown,
    decode_payload,
    encode_frame,
)

M = TypeVar("M", bound=Message)

WAIT = 30.0
"""Seconds a test waits for anything before it fails; long, for machines that are busy."""
_generations = itertools.count(int.from_bytes(os.urandom(6), "little") + 1)


def named_layout(sizes: Sequence[int] = (6, 4), mode: MergeMode = MergeMode.AVG) -> NamedLayout:
    """A small layout: one fragment of one tensor per size."""
    return NamedLayout(
        tuple(
            NamedFragment(mode, (TensorSpec(f"w{index}", (size,)),))
            for index, size in enumerate(sizes)
        )
    )


class Client:
    """One connection group of one learner, driven by hand.

    Attributes:
        received: every message that came, in order of completion.
        params: the newest broadcast (or final) values per fragment, f32.
        versions: their versions.
        manifest: the final manifest, once it came.
        final: final fragments, f32.
        ended: SHUTDOWN, "eof", or the text of an ERROR; None while the link is open.
    """

    def __init__(
        self,
        port: int,
        learner_id: int = 0,
        *,
        layout: NamedLayout | None = None,
        dtype: DType = DType.F32,
        streams: int = 0,
        generation: int | None = None,
        contract: bytes | None = None,
        profile: bytes | None = None,
        hello: bool = True,
    ) -> None:
        self.port = port
        self.learner_id = learner_id
        self.generation = generation or next(_generations)
        self.layout = layout or named_layout()
        self.dtype = dtype
        self.streams = streams
        self.received: list[Message] = []
        self._unread: deque[Message] = deque()
        self.params: dict[int, np.ndarray] = {}
        self.versions: dict[int, int] = {}
        self.final: dict[int, np.ndarray] = {}
        self.final_versions: dict[int, int] = {}
        self.manifest: FinalManifest | None = None
        self.ended: str | None = None
        self.local_step = 0
        self._buffers: dict[socket.socket, bytearray] = {}
        self._partials: dict[int, tuple[bytearray, int]] = {}
        self.control = self._connect()
        self.data: list[socket.socket] = []
        if hello:
            self.send_hello(contract=contract, profile=profile)

    # -- sending ---------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffers[sock] = bytearray()
        return sock

    def send_hello(self, *, contract: bytes | None = None, profile: bytes | None = None) -> None:
        """HELLO on the control socket, then one DATA_HELLO per data socket."""
        fingerprint = self.layout.fingerprint
        self.send(
            Hello(
                learner_id=self.learner_id,
                generation=self.generation,
                dtype=self.dtype,
                layout=self.layout.numeric,
                fingerprint=fingerprint,
                contract=contract or fingerprint,
                profile=profile,
                num_streams=self.streams,
            )
        )
        for index in range(self.streams):
            sock = self._connect()
            sock.sendall(encode_frame(DataHello(self.learner_id, self.generation, index)))
            self.data.append(sock)

    def send(self, message: Message) -> None:
        """One frame on the control socket."""
        self.control.sendall(encode_frame(message))

    def send_raw(self, data: bytes) -> None:
        self.control.sendall(data)

    def init(self, values: Sequence[np.ndarray]) -> None:
        """All INIT_PARAMS, unchunked on stream 0 (P1)."""
        for index, array in enumerate(values):
            self.send(InitParams(index, encode(array, self.dtype.bulk)))

    def push(
        self,
        pull: PullRequest,
        delta: np.ndarray,
        *,
        base: int | None = None,
        steps: int = 1,
        tokens: int = 16,
    ) -> None:
        """Answer a PULL with a learner delta."""
        self.local_step += steps
        self.send(
            PushFragment(
                learner_id=self.learner_id,
                fragment=pull.fragment,
                step=pull.step,
                attempt=pull.attempt,
                base_version=self.versions.get(pull.fragment, 0) if base is None else base,
                local_step=self.local_step,
                c_steps=steps,
                c_tokens=tokens,
                tensor=encode(delta, self.dtype),
            )
        )

    def acknowledge(self) -> None:
        """FINAL_ACK of the manifest that came."""
        assert self.manifest is not None
        self.send(FinalAck(self.manifest.step))

    def heartbeat(self) -> None:
        self.send(Heartbeat(self.learner_id, self.local_step))

    def close(self) -> None:
        """Close every socket at once."""
        for sock in (self.control, *self.data):
            sock.close()

    # -- receiving -------------------------------------------------------------------------------

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.control, *self.data]

    def poll(self, timeout: float) -> list[Message]:
        """Messages that complete within `timeout` seconds, at the first moment there are any."""
        end = time.monotonic() + timeout
        while self.ended is None:
            ready, _, _ = select.select(self.sockets, [], [], max(0.0, end - time.monotonic()))
            messages = [message for sock in ready for message in self.feed(sock)]
            if messages or not ready:
                return messages
        return []

    def feed(self, sock: socket.socket) -> Iterator[Message]:
        """Read once from a ready socket; the messages that are complete with it."""
        try:
            data = sock.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self.ended = self.ended or "eof"
            return
        buffer = self._buffers[sock]
        buffer += data
        while len(buffer) >= FRAME_HEADER.size:
            magic, kind, length = FRAME_HEADER.unpack_from(buffer)
            assert magic == MAGIC
            if len(buffer) < FRAME_HEADER.size + length:
                return
            payload = bytes(buffer[FRAME_HEADER.size : FRAME_HEADER.size + length])
            del buffer[: FRAME_HEADER.size + length]
            message = self._take(MessageType(kind), payload)
            if message is not None:
                self._note(message)
                yield message

    def _take(self, kind: MessageType, payload: bytes) -> Message | None:
        if kind is not MessageType.CHUNK:
            return decode_payload(kind, memoryview(payload))
        msg_id, total, offset = CHUNK_HEADER.unpack_from(payload)
        body = payload[CHUNK_HEADER.size :]
        whole, held = self._partials.pop(msg_id, (bytearray(total), 0))
        whole[offset : offset + len(body)] = body
        held += len(body)
        if held < total:
            self._partials[msg_id] = (whole, held)
            return None
        magic, inner, length = FRAME_HEADER.unpack_from(whole)
        assert magic == MAGIC
        assert length == total - FRAME_HEADER.size
        return decode_payload(MessageType(inner), memoryview(bytes(whole))[FRAME_HEADER.size :])

    def _note(self, message: Message) -> None:
        self.received.append(message)
        self._unread.append(message)
        match message:
            case Broadcast(fragment, version, tensor):
                if version >= self.versions.get(fragment, 0):
                    self.params[fragment] = decode(tensor, self.dtype.bulk)
                    self.versions[fragment] = version
            case FinalFragment(fragment, version, tensor):
                self.final[fragment] = decode(tensor, DType.F32)
                self.final_versions[fragment] = version
            case FinalManifest():
                self.manifest = message
            case ErrorMessage(text):
                self.ended = text
            case Shutdown():
                self.ended = "SHUTDOWN"

    def take(self, kind: type[M]) -> M | None:
        """The oldest unhandled message of `kind`, which is handled with this; None without one."""
        for message in self._unread:
            if isinstance(message, kind):
                self._unread.remove(message)
                return message
        return None

    def take_all(self) -> list[Message]:
        """Every unhandled message, in order."""
        messages = list(self._unread)
        self._unread.clear()
        return messages

    def expect(self, kind: type[M], timeout: float = WAIT) -> M:
        """Wait for a message of `kind`; others stay unhandled."""
        end = time.monotonic() + timeout
        while (message := self.take(kind)) is None:
            assert self.ended is None, f"ended by {self.ended} before a {kind.__name__}"
            assert time.monotonic() < end, f"no {kind.__name__}; last {self.received[-3:]}"
            self.poll(end - time.monotonic())
        return message

    def until_end(self, timeout: float = WAIT) -> str:
        """Read until ERROR, SHUTDOWN or EOF; says which."""
        end = time.monotonic() + timeout
        while self.ended is None:
            assert time.monotonic() < end, f"still open; got {self.received[-3:]}"
            self.poll(end - time.monotonic())
        return self.ended

    @property
    def has_cut(self) -> bool:
        """Whether the manifest and every fragment it names are here."""
        return self.manifest is not None and len(self.final) == len(self.layout)


Delta = Callable[[Client, PullRequest], np.ndarray]


def constant_delta(client: Client, pull: PullRequest) -> np.ndarray:
    """A delta that depends on the learner and the fragment only."""
    numel = client.layout.fragments[pull.fragment].numel
    return np.full(numel, 0.25 * (client.learner_id + 1), np.float32)


def drive(
    clients: Sequence[Client],
    *,
    until: Callable[[], bool] | None = None,
    delta: Delta = constant_delta,
    acknowledge: bool = True,
    timeout: float = WAIT,
) -> None:
    """Let clients answer every PULL and the final cut, until `until` or until all have ended."""
    end = time.monotonic() + timeout
    for client in clients:
        _handle(client, delta, acknowledge)
    while not (until() if until else all(client.ended for client in clients)):
        owners = {sock: c for c in clients if c.ended is None for sock in c.sockets}
        assert owners, f"all ended: {[client.ended for client in clients]}"
        left = end - time.monotonic()
        assert left > 0, f"not there in {timeout} s; ended: {[c.ended for c in clients]}"
        ready, _, _ = select.select(list(owners), [], [], min(left, 0.1))
        for sock in ready:
            for _ in owners[sock].feed(sock):
                _handle(owners[sock], delta, acknowledge)


def _handle(client: Client, delta: Delta, acknowledge: bool) -> None:
    for message in client.take_all():
        if isinstance(message, PullRequest):
            client.push(message, delta(client, message))
        elif not isinstance(message, FinalFragment | FinalManifest):
            continue
        elif acknowledge and client.has_cut:
            client.acknowledge()


def encode(values: np.ndarray, dtype: DType) -> bytes:
    """f32 raw, or bf16 by truncation (exact for the values of these tests)."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype is DType.F32:
        return values.tobytes()
    assert dtype is DType.BF16
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def decode(data: bytes | bytearray | memoryview, dtype: DType) -> np.ndarray:
    if dtype is DType.F32:
        return np.frombuffer(data, np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def frame(kind: int, payload: bytes, *, magic: int = MAGIC, length: int | None = None) -> bytes:
    """A frame with any header."""
    return struct.pack("<IBQ", magic, kind, len(payload) if length is None else length) + payload


class Syncer:
    """A real `yeto-syncer` process in a directory of its own.

    Attributes:
        pid: of the process.
        port: as the ready file names it.
    """

    def __init__(
        self, directory: Path, *arguments: str, wait: bool = True, patch: str | None = None
    ) -> None:
        self.directory = directory
        self.ready_path = directory / "ready.json"
        self.tape = directory / "tape.jsonl"
        self.checkpoint = directory / "state.ckpt"
        self.ready_path.unlink(missing_ok=True)
        self._stderr_path = directory / "stderr.txt"
        options = {
            "--port": "0",
            "--ready-file": str(self.ready_path),
            "--checkpoint-path": str(self.checkpoint),
            "--event-tape": str(self.tape),
            "--sync-interval-steps": "0",
        }
        given = {argument.split("=")[0] for argument in arguments}
        defaults = [item for flag, value in options.items() if flag not in given
                    for item in (flag, value)]  # fmt: skip
        self.pid = zygote().start(
            [*arguments, *defaults], directory, directory / "stdout.txt", self._stderr_path, patch
        )
        self.port = 0
        if wait:
            self.wait_ready()

    @property
    def stderr(self) -> str:
        """Everything that processes of this directory have said."""
        return self._stderr_path.read_text()

    def poll(self) -> int | None:
        """The exit code once it has ended; negative for a signal."""
        return zygote().poll(self.pid)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Until the ready file names the port."""
        end = time.monotonic() + timeout
        while not self.ready_path.exists():
            code = self.poll()
            assert code is None, f"exit {code}: {self.stderr}"
            assert time.monotonic() < end, "the syncer is not ready"
            time.sleep(0.005)
        self.port = json.loads(self.ready_path.read_text())["port"]

    def wait(self, timeout: float = WAIT) -> int:
        """The exit code."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"still running: {self.stderr[-500:]}"
            time.sleep(0.005)
        return code

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; harmless when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def __enter__(self) -> Syncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
