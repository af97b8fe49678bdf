"""The ready file (cli.md section 4)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from syncer.ready import ReadyFile


def test_one_line_with_address_pid_and_profile(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.write_text("an old one")
    ready = ReadyFile(path)
    ready.write("127.0.0.1", 29400, b"\xab" * 32)
    text = path.read_text()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "host": "127.0.0.1",
        "port": 29400,
        "pid": os.getpid(),
        "profile": "ab" * 32,
    }
    assert os.listdir(tmp_path) == ["ready"]
    ready.remove()
    assert os.listdir(tmp_path) == []
    ready.remove()


@pytest.mark.parametrize("content", ['{"pid": 1}', "not json", "[]", "\ud800"])
def test_the_file_of_another_process_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ready"
    ready = ReadyFile(path)
    ready.write("127.0.0.1", 1, b"\0" * 32)
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    ready.remove()
    assert path.exists()
