"""Real processes whose JSON log lines are read as they come."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Line:
    """One log line: who wrote it, when it was written (Unix seconds), and its fields."""

    program: str
    ts: float
    fields: dict[str, Any]

    @property
    def event(self) -> str:
        """The kind of line; empty for plain text."""
        return str(self.fields.get("event", ""))

    @property
    def message(self) -> str:
        """The line as a person reads it."""
        return str(self.fields.get("message", ""))


class Programs:
    """Starts commands of this project, gathers their lines, and leaves none running."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: queue.Queue[Line] = queue.Queue(maxsize=10_000)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: dict[str, threading.Thread] = {}

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running = [p for p in self._processes.values() if p.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, command: str, *arguments: str) -> None:
        """Runs `command` (a script of this installation) with `--log-format json`."""
        script = Path(sys.executable).with_name(command)
        process = subprocess.Popen(
            [str(script), *arguments, "--log-format", "json"],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._processes[name] = process
        # A daemon, so that a program that ignores every signal cannot keep the demo alive.
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        self._readers[name] = reader
        reader.start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with (self._folder / f"{name}.log").open("w") as log:
            for text in process.stderr:
                log.write(text)
                self._lines.put(_parsed(name, text))

    def next_line(self, timeout: float) -> Line | None:
        """The next line of any program; None when `timeout` seconds brought none."""
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    def lines(self, wait: float) -> Iterator[Line]:
        """All lines that have come; for the first one it waits up to `wait` seconds."""
        line = self.next_line(wait)
        while line is not None:
            yield line
            line = self.next_line(0)

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a program that was started."""
        self._processes[name].send_signal(number)

    def exit_code(self, name: str) -> int | None:
        """None while it runs or while lines of it may still come."""
        if self._readers[name].is_alive():
            return None
        return self._processes[name].wait()


def _parsed(name: str, text: str) -> Line:
    try:
        fields = json.loads(text)
        return Line(name, float(fields["ts"]), fields)
    except (ValueError, KeyError, TypeError):  # a traceback, or a library that prints
        return Line(name, time.time(), {"message": text.rstrip()})
