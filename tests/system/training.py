"""A small run of real `yeto-syncer` and `yeto-learner` processes, for tests.

Every wait is for a condition, driven by the lines the programs write; a wait that takes too long
fails with what each program said last.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.demo.programs import Line, Programs
from syncer.tape import CommitRecord, read_commits

WAIT_S = 180.0
TICK_S = 0.05
TINY_MODEL = (
    "--layers=1",
    "--width=32",
    "--heads=2",
    "--seq-len=32",
    "--batch-size=2",
    "--fragments=3",
    "--eval-every-steps=1000000",
)
TEXT = "Three learners and a syncer walk into a test. One of them is killed, the others go on. "


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Training:
    """One syncer and some learners on a port of their own."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.folder = folder
        self.port = free_port()
        self.tape = folder / "tape.jsonl"
        self.checkpoint = folder / "yeto-state.ckpt"
        self.lines: list[Line] = []
        self._programs = programs
        self._text = folder / "text.txt"
        self._text.write_text(TEXT * 500)

    def start_syncer(self, *flags: str, name: str = "syncer") -> None:
        """Starts it; does not wait until it listens."""
        self._programs.start(
            name,
            "yeto-syncer",
            f"--port={self.port}",
            f"--checkpoint-path={self.checkpoint}",
            f"--event-tape={self.tape}",
            f"--ready-file={self.folder / 'ready.json'}",
            "--checkpoint-every=1",
            "--sync-interval-steps=0",
            *flags,
        )

    def start_learner(self, number: int, *flags: str, name: str | None = None) -> str:
        """Starts one on the tiny model; later flags win. Returns its name."""
        name = name or f"learner-{number}"
        self._programs.start(
            name,
            "yeto-learner",
            f"--connect=127.0.0.1:{self.port}",
            f"--learner-id={number}",
            f"--data={self._text}",
            f"--output-dir={self.folder / name}",
            *TINY_MODEL,
            *flags,
        )
        return name

    def signal(self, name: str, number: int) -> None:
        """Sends a real signal."""
        self._programs.signal(name, number)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds; it is looked at after every line and every tick."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            self.lines.extend(self._programs.lines(TICK_S))
            assert time.monotonic() < deadline, f"waited too long for {what}\n{self._story()}"

    def said(self, name: str) -> list[str]:
        """What a program has said so far."""
        return [line.message for line in self.lines if line.program == name]

    def wait_for_line(self, name: str, text: str, times: int = 1) -> None:
        """Until a program has said a line with `text` this many times."""
        self.wait(
            f"{name} to say {text!r}",
            lambda: sum(text in message for message in self.said(name)) >= times,
        )

    def commits(self) -> list[CommitRecord]:
        """The rounds committed so far."""
        return read_commits(self.tape) if self.tape.exists() else []

    def wait_for_commits(
        self, count: int, like: Callable[[CommitRecord], bool] = lambda commit: True
    ) -> None:
        """Until the tape holds this many commits that are like what is asked for."""
        self.wait(f"{count} commits", lambda: sum(map(like, self.commits())) >= count)

    def wait_for_exit(self, *names: str, code: int = 0) -> None:
        """Waits until these programs have ended, each with this exit code."""
        for name in names:
            self.wait(
                f"{name} to end", lambda name=name: self._programs.exit_code(name) is not None
            )
            found = self._programs.exit_code(name)
            assert found == code, f"{name} ended with {found}, not {code}\n{self._story()}"

    def result(self, name: str) -> dict[str, object]:
        """The JSON beside a learner's final model."""
        return dict(json.loads((self.folder / name / "result.json").read_text()))

    def model(self, name: str) -> bytes:
        """The final model file of a learner."""
        return (self.folder / name / "model.safetensors").read_bytes()

    def _story(self) -> str:
        return "\n".join(f"{line.program}: {line.message}" for line in self.lines[-40:])
