"""A worker for tests that answers the probe and then behaves as its first argument says."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from pathlib import Path

MAGIC = b"YETOISO1"
HEAD = struct.Struct("<8sIIQQQQ")


def read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def forever() -> None:
    while True:
        signal.pause()


def answer(request: tuple, payload: bytes, behaviour: str) -> None:
    _, _, _, number, rows, cols, size = request
    if behaviour == "exit":
        sys.exit(4)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "hang":
        forever()
    if behaviour == "hang-then-exit":
        time.sleep(0.5)
        sys.exit(4)
    if behaviour == "slow":
        time.sleep(0.05)
    if behaviour.startswith("meet:"):
        # Only done when the worker of the other device has a request at the same time.
        meeting = Path(behaviour.removeprefix("meet:"))
        (meeting / f"{os.getpid()}.here").touch()
        while len(list(meeting.glob("*.here"))) < 2:
            time.sleep(0.005)
    if behaviour == "garbage":
        write(b"Traceback (most recent call last): this is not a frame at all")
        forever()
    if behaviour == "wrong-id":
        number = 99
    if behaviour == "wrong-shape":
        rows, cols = 1, rows * cols
    if behaviour == "wrong-length":
        size -= 4
    if behaviour == "nan":
        payload = struct.pack("<f", float("nan")) + payload[4:]
    if behaviour in ("error", "long-error"):
        text = b"it went wrong" if behaviour == "error" else b"x" * 70000
        write(HEAD.pack(MAGIC, 1, 6, number, rows, cols, len(text)) + text)
        return
    frame = HEAD.pack(MAGIC, 1, 0, number, rows, cols, size) + payload
    if behaviour == "short":
        write(frame[:-3])
        sys.exit(0)
    write(frame)


def main() -> None:
    behaviour = sys.argv[1]
    if behaviour == "exit-at-start":
        sys.exit(3)
    if behaviour == "garbage-at-start":
        write(b"hello, I am a login banner and I come before every frame of yours\n")
    if behaviour == "stop-at-start":
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "silent-at-start" or (
        behaviour == "silent-at-start-on-b" and sys.argv[-1] == "b"
    ):
        forever()
    probed = False
    while True:
        request = HEAD.unpack(read(HEAD.size))
        payload = read(request[-1])
        if not probed and behaviour == "wrong-probe":
            payload = struct.pack("<f", 1.0000001)
        answer(request, payload, behaviour if probed else "echo")
        probed = True


if __name__ == "__main__":
    main()
