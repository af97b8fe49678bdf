"""What a new user reads when the first try goes wrong."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch import nn

from learner import Learner, LearnerConfig, hints
from learner.errors import ProtocolFault, SyncerRefused
from tests.learner.scripted import PATIENCE_S, scripted_syncer
from wire.errors import ErrorCode, ProtocolError


def first_steps(port: int) -> None:
    config = LearnerConfig(connect=f"127.0.0.1:{port}", streams=0, connect_timeout_s=PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    with Learner(nn.Linear(2, 2), config) as sync:
        while time.monotonic() < end:
            sync.step(tokens=1)


def test_something_else_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            # A close with bytes unread is a reset, which may overtake the answer.
            while peer.recv(1 << 16):
                pass
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolFault, match="is it a yeto-syncer that listens there"):
            first_steps(server.getsockname()[1])
        thread.join(PATIENCE_S)


def test_another_model() -> None:
    with scripted_syncer() as syncer:
        syncer.refusal = ProtocolError(ErrorCode.SESSION_MISMATCH, "layout ab differs from cd")
        with pytest.raises(SyncerRefused) as refused:
            first_steps(syncer.port)
    assert str(refused.value).startswith(
        "session-mismatch: layout ab differs from cd; all learners"
    )


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("session-mismatch: contract a differs from the session's b", "another run id"),
        ("session-mismatch: dtype 2 differs from the session's 3", "another --wire-dtype"),
        (
            "session-mismatch: fingerprint a differs from the session's b; contract c differs",
            "layout.json files show where",
        ),
        ("auth: HELLO is not sealed, this syncer requires a key", "YETO_AUTH_KEY_FILE"),
        (
            "num-streams: 42095 data sockets, at most 256; this syncer has no key, so a sealed "
            "HELLO cannot be opened here",
            "start this learner without one",
        ),
    ],
)
def test_advice_fits_what_differs(text: str, advice: str) -> None:
    said = hints.refusal(text)
    assert said.startswith(text + "; ")
    assert advice in said


@pytest.mark.parametrize("text", ["", "no code at all", "stopped: enough", "unheard-of: x"])
def test_what_is_not_known_is_left_as_it_is(text: str) -> None:
    assert hints.refusal(text) == text


def test_a_fault_in_the_middle_is_no_wrong_address() -> None:
    problem = ProtocolError(ErrorCode.BAD_MAGIC, "a frame begins with 0x0")
    assert "listens there" in hints.fault(problem, heard=False)
    assert "listens there" not in hints.fault(problem, heard=True)
