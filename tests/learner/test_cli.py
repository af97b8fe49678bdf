"""`yeto-learner` says in one line what its task could not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [("--lr", "1e300", "Error: "), ("--seq-len", "1" + "0" * 30, "OverflowError: ")],
)
def test_numbers_that_lead_nowhere_end_in_one_line(tmp_path, option: str, value: str, name: str):
    """cli.md section 5: a failed run is exit 1; no traceback without --log-level debug."""
    command = [Path(sys.executable).with_name("yeto-learner"), "--connect", "none"]
    command += ["--max-local-steps", "2", "--log-level", "error", option, value]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "training failed" in done.stderr
    assert name in done.stderr
