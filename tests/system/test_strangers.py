"""What bad clients get, and that nobody else notices (W6, W7, W12, W13, W17, section 9)."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.system.client import Client, Syncer, drive, frame, named_layout
from wire.dtypes import DType
from wire.frames import MessageType
from wire.messages import (
    Broadcast,
    BudgetDone,
    DataHello,
    Heartbeat,
    Hello,
    InitParams,
    PullRequest,
    PushFragment,
    encode_frame,
)

Join = Callable[..., Client]
INIT = [np.arange(6, dtype=np.float32), np.full(4, -1.0, np.float32)]
HANDSHAKE = 0.5
STALL = 1.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Syncer]:
    """One syncer for all strangers of this module: it must serve to the end (W37)."""
    process = Syncer(
        tmp_path_factory.mktemp("syncer"),
        *("--quorum", "1", "--learners", "8", "--handshake-timeout-s", str(HANDSHAKE)),
        *("--stall-timeout-s", str(STALL), "--heartbeat-timeout-s", "1", "--grace-ms", "0"),
        *("--max-connections", "40"),
    )
    with process:
        yield process


@pytest.fixture(scope="module")
def honest(running: Syncer) -> Iterator[Client]:
    """The learner that everybody else must not disturb."""
    client = Client(running.port, 0)
    client.init(INIT)
    client.expect(Broadcast)
    yield client
    assert client.ended is None
    client.close()


def next_pull(honest: Client, client: Client) -> PullRequest:
    """A PULL to `client`; the honest learner answers its own meanwhile."""
    while (pull := client.take(PullRequest)) is None:
        version = honest.versions[0]
        drive([honest], until=lambda: honest.versions[0] > version)  # noqa: B023
        client.poll(0.05)
    return pull


@pytest.fixture(autouse=True)
def still_served(honest: Client, running: Syncer) -> Iterator[None]:
    """After each stranger the run goes on (W13, W37)."""
    yield
    version = honest.versions[0]
    drive([honest], until=lambda: honest.versions[0] > version)
    assert running.poll() is None


def hello_bytes(running: Syncer, **changes: object) -> bytes:
    """A HELLO frame, legal but for `changes`."""
    layout = named_layout()
    fields = {
        "version": 4,
        "learner": 1,
        "generation": int.from_bytes(os.urandom(7), "little") + 1,
        "dtype": 1,
        "count": 2,
        "layout": layout.numeric.encode(),
        "tail": layout.fingerprint * 2 + struct.pack("<H", 0),
    } | changes
    head = struct.pack(
        "<HIQBI", *(fields[k] for k in ("version", "learner", "generation", "dtype", "count"))
    )
    return frame(1, head + fields["layout"] + fields["tail"])


def answer(port: int, data: bytes, timeout: float = 5.0) -> str:
    """The ERROR text that these first bytes get; empty for a silent close."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        sock.sendall(data)
        received = b""
        while chunk := sock.recv(4096):
            received += chunk
    if not received:
        return ""
    magic, kind, length = struct.unpack_from("<IBQ", received)
    assert (magic, kind, length) == (0xD170C0DE, 10, len(received) - 13)
    assert length <= 1024
    return received[13:].decode()


LAYOUT = named_layout().numeric.encode()
FINGERPRINT = named_layout().fingerprint


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 3}, "version"),
        ({"learner": 8}, "learner-id"),
        ({"generation": 0}, "generation"),
        ({"dtype": 0}, "dtype"),
        ({"dtype": 4}, "dtype"),
        ({"count": 0}, "layout"),
        ({"count": 2**32 - 1}, "layout"),
        ({"layout": LAYOUT.replace(b"\x00", b"\x03", 1)}, "layout"),
        ({"layout": struct.pack("<BIQ", 0, 1, 0) * 2}, "layout"),
        ({"layout": struct.pack("<BIQ", 0, 1, 2**63) * 2}, "layout"),
        ({"layout": struct.pack("<BIQ", 0, 1, 2**62) * 2}, "layout"),
        ({"tail": FINGERPRINT * 2}, "hello-tail"),
        ({"tail": FINGERPRINT * 2 + b"\0\0\0"}, "hello-tail"),
        ({"tail": FINGERPRINT * 2 + struct.pack("<H", 257)}, "num-streams"),
        ({"tail": FINGERPRINT * 3 + b"\0\0"}, "profile-mismatch"),
        ({"dtype": 2}, "session-mismatch"),
        ({"tail": bytes(32) + FINGERPRINT + b"\0\0"}, "session-mismatch"),
        ({"layout": struct.pack("<BIQ", 0, 1, 9) * 2}, "session-mismatch"),
    ],
)
def test_each_step_of_the_acceptance_order_has_its_code(
    running: Syncer, changes: dict[str, object], code: str
) -> None:
    """W12, W13."""
    text = answer(running.port, hello_bytes(running, **changes))
    assert text.split(":")[0] == code, text


def test_a_mismatch_names_field_and_both_values(running: Syncer) -> None:
    """W41, P10."""
    text = answer(running.port, hello_bytes(running, tail=bytes(32) + FINGERPRINT + b"\0\0"))
    assert "fingerprint" in text
    assert FINGERPRINT.hex()[:16] in text
    assert "0" * 16 in text


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "bad-magic"),
        (os.urandom(4096).replace(b"\xde", b"\x00"), "bad-magic"),
        (frame(6, bytes(12)), "bad-type"),
        (frame(99, b""), "bad-type"),
        (frame(1, b"", length=16_777_217), "too-long"),
        (frame(1, b"", length=2**64 - 1), "too-long"),
        (frame(8, bytes(15)), "bad-length"),
        (frame(1, b""), "bad-length"),
        (frame(8, struct.pack("<HIQH", 3, 1, 5, 0)), "version"),
        (frame(8, struct.pack("<HIQH", 4, 8, 5, 0)), "learner-id"),
        (frame(8, struct.pack("<HIQH", 4, 1, 0, 0)), "generation"),
    ],
)
def test_a_bad_first_frame_gets_an_error(running: Syncer, data: bytes, code: str) -> None:
    """W6, W7, W17: bad first frame → ERROR on that socket."""
    assert answer(running.port, data).split(":")[0] == code


def test_a_silent_socket_is_closed_silently_after_the_handshake_timeout(running: Syncer) -> None:
    """W7: an ERROR would be fatal to an honest learner."""
    start = time.monotonic()
    for data in (b"", frame(1, b"", length=100)[:7], hello_bytes(running)[:-1]):
        assert answer(running.port, data) == ""
    assert time.monotonic() - start >= 3 * HANDSHAKE * 0.9


def test_a_data_socket_waits_for_its_group_then_fails(running: Syncer) -> None:
    """W17."""
    start = time.monotonic()
    text = answer(running.port, encode_frame(DataHello(1, 12345, 0)))
    assert text.split(":")[0] == "unknown-group"
    assert time.monotonic() - start >= HANDSHAKE * 0.9


def test_a_data_socket_may_come_before_its_group(running: Syncer) -> None:
    """W14, W17."""
    generation = 777
    with socket.create_connection(("127.0.0.1", running.port)) as early:
        early.sendall(encode_frame(DataHello(2, generation, 0)))
        client = Client(running.port, 2, generation=generation, hello=False)
        layout = client.layout.numeric
        client.send(
            Hello(2, generation, DType.F32, layout, FINGERPRINT, FINGERPRINT, None, num_streams=1)
        )
        early.settimeout(5)
        assert early.recv(5)[4] == MessageType.CHUNK  # it carries the group's bulk now
        taken = answer(running.port, encode_frame(DataHello(2, generation, 0)))
        beyond = answer(running.port, encode_frame(DataHello(2, generation, 1)))
        assert {taken.split(":")[0], beyond.split(":")[0]} == {"stream-index"}
        assert client.ended is None
        client.close()


def test_a_live_generation_is_not_taken_over(running: Syncer, honest: Client) -> None:
    """W12.14, W13."""
    text = answer(running.port, hello_bytes(running, learner=0, generation=honest.generation))
    assert text.split(":")[0] == "duplicate-generation"


def push(**changes: int) -> PushFragment:
    fields = {
        "learner_id": 3,
        "fragment": 0,
        "step": 1,
        "attempt": 1,
        "base_version": 0,
        "local_step": 1,
        "c_steps": 1,
        "c_tokens": 1,
    } | changes
    return PushFragment(**fields, tensor=bytes(24))


CHUNK = struct.Struct("<QQQ")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\0" * 13, "bad-magic"),
        (frame(5, bytes(16)), "bad-type"),
        (frame(1, bytes(100)), "bad-type"),
        (frame(8, bytes(16)), "bad-type"),
        (frame(4, b"", length=73), "too-long"),
        (frame(6, b"", length=11), "bad-length"),
        (frame(6, b"", length=2**63), "bad-length"),
        (encode_frame(push(fragment=2)), "bad-fragment"),
        (encode_frame(push(fragment=1)), "bad-length"),
        (encode_frame(push(learner_id=4)), "identity"),
        (encode_frame(push(attempt=0)), "attempt"),
        (encode_frame(push(c_steps=0)), "attempt"),
        (encode_frame(Heartbeat(4, 0)), "identity"),
        (encode_frame(InitParams(0, bytes(24))), "init-forbidden"),
        (encode_frame(BudgetDone(5)), "budget-off"),
        (frame(12, struct.pack("<HQ", 2, 1)), "revision"),
        (frame(9, CHUNK.pack(0, 12, 0) + b"x"), "chunk"),
        (frame(9, CHUNK.pack(0, 10**9, 0) + b"x"), "chunk"),
        (frame(9, CHUNK.pack(0, 40, 39) + b"xx"), "chunk"),
        (frame(9, CHUNK.pack(0, 40, 2**64 - 1) + b"x"), "chunk"),
        (frame(9, CHUNK.pack(0, 40, 0) + b"x") * 2, "chunk"),
        (b"".join(frame(9, CHUNK.pack(i, 40, 0) + b"x") for i in range(65)), "partial-limit"),
        (frame(9, bytes(24)), "bad-length"),
    ],
)
def test_a_fault_closes_the_whole_group_with_its_code(
    running: Syncer, join: Join, data: bytes, code: str
) -> None:
    """Section 9: ERROR on control, then every socket of the group."""
    client = join(running, 3, streams=1)
    client.expect(Broadcast)
    client.send_raw(data)
    assert client.until_end().split(":")[0] == code
    client.data[0].settimeout(3)
    while client.data[0].recv(65536):
        pass


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_cost_their_sender_the_connection(
    running: Syncer, honest: Client, join: Join, value: float
) -> None:
    """W11, N22."""
    client = join(running, 4)
    pull = next_pull(honest, client)
    numel = client.layout.fragments[pull.fragment].numel
    client.push(pull, np.full(numel, value, np.float32))
    assert client.until_end().split(":")[0] == "non-finite"


def test_eof_on_a_data_socket_closes_the_group_without_error(running: Syncer, join: Join) -> None:
    """Section 9."""
    client = join(running, 5, streams=2)
    client.expect(Broadcast)
    client.data.pop().close()
    assert client.until_end() == "eof"


def test_a_learner_that_stops_its_heartbeat_is_let_go(running: Syncer, join: Join) -> None:
    """W43: without ERROR, so that it may redial."""
    client = join(running, 6)
    client.heartbeat()
    start = time.monotonic()
    assert client.until_end() == "eof"
    assert 0.9 <= time.monotonic() - start < 3


def test_refused_pushes_are_silent(running: Syncer, honest: Client, join: Join) -> None:
    """C20: everything that only breaks a round rule is dropped without a word."""
    client = join(running, 3)
    pull = next_pull(honest, client)
    zeros = np.zeros(client.layout.fragments[pull.fragment].numel, np.float32)
    client.push(PullRequest(pull.fragment, pull.step + 1000, 1), zeros)
    client.push(pull, zeros, base=10**9)
    client.push(PullRequest(pull.fragment, pull.step, 99), zeros)
    client.push(pull, zeros)
    client.push(pull, zeros)
    drive([honest, client], until=lambda: client.versions[pull.fragment] >= pull.step)
    assert client.ended is None


def test_more_sockets_than_allowed_are_closed_silently(running: Syncer) -> None:
    """W9 table: --max-connections."""
    held: list[socket.socket] = []
    try:
        for _ in range(60):
            held.append(socket.create_connection(("127.0.0.1", running.port), timeout=5))
        time.sleep(0.1)
        closed = 0
        for sock in held:
            sock.setblocking(False)
            try:
                closed += sock.recv(1) == b""
            except BlockingIOError:
                continue
            except ConnectionResetError:
                closed += 1
        assert closed >= 20
    finally:
        for sock in held:
            sock.close()
    time.sleep(0.05)


def test_no_descriptor_is_left_behind(running: Syncer) -> None:
    """Runs last: after all these strangers only the listener and the honest learner are open."""
    path = Path(f"/proc/{running.pid}/fd")
    if not path.exists():
        pytest.skip("no /proc here")

    def sockets() -> int:
        links = []
        for entry in path.iterdir():
            try:
                links.append(os.readlink(entry))
            except OSError:
                continue
        return sum(link.startswith("socket:") for link in links)

    end = time.monotonic() + 5
    while sockets() > 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert sockets() <= 5
