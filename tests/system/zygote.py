"""Starts processes of the programs without the seconds that loading the libraries takes.

One process loads everything once and forks for each start; the fork is the real program with its
own sockets, signals and exit code. Run as a module it is that process; it speaks JSON lines.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Zygote:
    """The loaded process, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.zygote"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
        patch: str | None = None,
        program: str = "yeto-syncer",
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """The pid of a new process; its output is appended to two files.

        `patch` names a module of tests whose `install()` runs in the new process first;
        `environment` is added to ours.
        """
        pid: int = self._ask(
            start=list(arguments),
            cwd=str(cwd),
            stdout=str(stdout),
            stderr=str(stderr),
            patch=patch,
            program=program,
            environment=dict(environment or {}),
        )
        return pid

    def poll(self, pid: int) -> int | None:
        """Its exit code (negative for a signal) once it has ended."""
        code: int | None = self._ask(poll=pid)
        return code

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def zygote() -> Zygote:
    """The one of this test run."""
    made = Zygote()
    atexit.register(made.close)
    return made


def _serve() -> None:
    from learner import cli as learner
    from syncer import cli as syncer
    from syncer import server  # noqa: F401  what takes so long

    programs = {"yeto-syncer": syncer.main, "yeto-learner": learner.main}
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                _become(request)
                if request["patch"] is not None:
                    importlib.import_module(request["patch"]).install()
                name = request["program"]
                programs[name](args=request["start"], prog_name=name)
            answer: int | None = pid
        else:
            pid = request["poll"]
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any]) -> None:
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    null = os.open(os.devnull, os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, source in (
        (0, null),
        (1, os.open(request["stdout"], flags, 0o644)),
        (2, os.open(request["stderr"], flags, 0o644)),
    ):
        os.dup2(source, target)
        os.close(source)


if __name__ == "__main__":
    _serve()
