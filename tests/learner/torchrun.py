"""Two ranks of one program, started by torchrun, gloo on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.learner.scripted import ScriptedSyncer

ROOT = Path(__file__).parents[2]


@contextmanager
def two_ranks(
    program: Path, syncer: ScriptedSyncer, *arguments: str, seconds: float
) -> Iterator[None]:
    """Runs `program PORT ARGUMENTS...` beside the body, then waits for it to end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [str(program), str(syncer.port), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment)
    try:
        yield
        assert process.wait(seconds) == 0
    finally:
        process.kill()
        process.wait()


def reports(out: Path) -> list[dict]:
    """What each rank wrote about itself."""
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]
