"""Starts that are refused, and what a start writes (C4, C70, K8, K9, cli.md)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.client import Syncer
from tests.system.zygote import zygote

Start = Callable[..., Syncer]
PROGRAM = str(Path(sys.executable).parent / "yeto-syncer")


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str, cwd: Path) -> Result:
    """Run `yeto-syncer` to its end."""
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        pid = zygote().start(arguments, cwd, out, err)
        end = time.monotonic() + 30
        while (code := zygote().poll(pid)) is None:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return Result(code, out.read_text(), err.read_text())


def contents(directory: Path) -> dict[str, bytes]:
    """Files by name, without the lock and the logs of other processes."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.suffix not in (".lock", ".txt")
    }


def refused(directory: Path, *arguments: str) -> str:
    """Start with exit 2 and one line of explanation; nothing but the lock file may appear."""
    before = contents(directory)
    result = command("--port", "0", *arguments, cwd=directory)
    assert result.returncode == 2, result.stderr
    assert contents(directory) == before
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_print_profile_touches_nothing(tmp_path: Path) -> None:
    """W22."""
    result = subprocess.run(
        [
            *(PROGRAM, "--quorum", "3", "--checkpoint-every", "1", "--print-profile"),
            *("--event-tape", "t", "--ready-file", "r"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout == "a6985851b16f2e28625eecd989ddcd37509fb630459aa6c4f1210961beb8aa0d\n"
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_version_and_help(tmp_path: Path) -> None:
    assert re.fullmatch(r"yeto-syncer \d+\.\d+\.\d+\n", command("--version", cwd=tmp_path).stdout)
    text = command("--help", cwd=tmp_path).stdout
    for flag in ("--quorum", "--outer-lr-by-fragment", "--config", "--log-format"):
        assert flag in text


def test_usage_errors_are_exit_2(tmp_path: Path) -> None:
    for arguments in (("--quorum", "0"), ("--nonsense",), ("nonsense",), ("--resume=1",)):
        result = command(*arguments, cwd=tmp_path)
        assert result.returncode == 2, arguments
        assert "Error: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refused(
            tmp_path, "--port", str(port), "--event-tape", "tape", "--ready-file", "ready"
        )
    assert f"port {port} is in use" in message
    assert "--port" in message


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "--host", "192.0.2.1", "--insecure")
    assert "--host 192.0.2.1 is no address" in message


def test_an_existing_checkpoint_needs_a_decision(tmp_path: Path) -> None:
    """K9."""
    (tmp_path / "yeto-state.ckpt").write_bytes(b"something")
    message = refused(tmp_path)
    assert "--resume" in message
    assert "--checkpoint-path" in message


@pytest.mark.parametrize(
    ("files", "arguments", "words"),
    [
        ({}, ("--resume",), "--resume"),
        ({"yeto-state.ckpt": b"\x80\x5a\x70\xd1"}, ("--resume",), "yeto-state.ckpt"),
        ({"yeto-state.ckpt": b"no checkpoint at all" * 9}, ("--resume",), "magic"),
        ({"yeto-state.ckpt.prev": b"x"}, (), "prev"),
        ({}, ("--checkpoint-path", "no/such/dir/state"), "no/such/dir"),
        ({}, ("--event-tape", "no/such/tape"), "no/such/tape"),
        ({}, ("--ready-file", "no/such/ready"), "no/such/ready"),
        ({"old.jsonl": b'{"event": "sta'}, ("--ready-file", "no/r", "--event-tape", "old.jsonl"), "no/r"),
    ],
)  # fmt: skip
def test_refusals_name_the_file_and_change_nothing(
    tmp_path: Path, files: dict[str, bytes], arguments: tuple[str, ...], words: str
) -> None:
    """C4, K9."""
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert words in refused(tmp_path, *arguments)


def test_a_second_syncer_on_the_same_checkpoint_is_refused(syncer: Start, tmp_path: Path) -> None:
    """K8."""
    process = syncer()
    message = refused(tmp_path, "--checkpoint-path", str(process.checkpoint))
    assert "state.ckpt.lock" in message
    process.kill()
    syncer()  # the lock died with its owner


def test_the_stale_marker_goes_before_listening_in_budget_mode(
    syncer: Start, tmp_path: Path
) -> None:
    """C70."""
    marker = tmp_path / "state.ckpt.final"
    marker.write_text("YETO_FINAL_V1\nglobal_step=1\n")
    syncer("--learner-budget-steps", "5", "--learners", "1")
    assert not marker.exists()


def test_the_ready_file_tells_where_and_who(syncer: Start) -> None:
    process = syncer("--quorum", "3", "--checkpoint-every", "1", "--sync-interval-steps", "24")
    text = process.ready_path.read_text()
    assert text.count("\n") == 1
    entry = json.loads(text)
    assert entry == {
        "host": "127.0.0.1",
        "port": process.port,
        "pid": process.pid,
        "profile": "a6985851b16f2e28625eecd989ddcd37509fb630459aa6c4f1210961beb8aa0d",
    }
    assert f"semantic_profile_sha256={entry['profile']}" in process.stderr
    process.signal()
    assert process.wait() == 0
    assert not process.ready_path.exists()


def test_a_signal_during_the_start_ends_it_quietly(tmp_path: Path) -> None:
    """C82: nothing was begun, so there is nothing to finalize."""
    process = subprocess.Popen(
        [PROGRAM, "--port", "0"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    time.sleep(0.6)  # while the libraries load
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_it_works_as_typed_in_the_readme(tmp_path: Path) -> None:
    """cli.md: `yeto-syncer --quorum 3 --checkpoint-every 1`, but for the port."""
    process = subprocess.Popen(
        [PROGRAM, "--quorum", "3", "--checkpoint-every", "1", "--port", "0"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "listening on 127.0.0.1" in line
    assert "yeto-state.ckpt" in line
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_a_foreign_address_needs_protection_or_a_decision(syncer: Start, tmp_path: Path) -> None:
    """S20."""
    message = refused(tmp_path, "--host", "0.0.0.0")
    assert all(way in message for way in ("--auth-key-file", "--tls-client-ca", "--insecure"))
    process = syncer("--host", "0.0.0.0", "--insecure")
    assert "warning: " in process.stderr
    assert "0.0.0.0" in process.stderr


def test_options_without_effect_are_warned_about(syncer: Start) -> None:
    process = syncer("--iso-worker-devices", "cpu")
    assert "warning: --iso-worker-devices has no effect" in process.stderr


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root writes anywhere")
def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "locked"
    directory.mkdir()
    directory.chmod(0o555)
    as_nobody = ["setpriv", "--reuid=65534", "--clear-groups"] if os.getuid() == 0 else []
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if not os.stat(parent).st_mode & 0o001:
            pytest.skip("the temporary directory is closed to other users")
    result = subprocess.run(
        [*as_nobody, PROGRAM, "--port", "0", "--checkpoint-path", str(directory / "s")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if "ModuleNotFoundError" in result.stderr or "Permission denied: '/root" in result.stderr:
        pytest.skip("the interpreter is closed to other users")
    assert result.returncode == 2
    assert str(directory) in result.stderr
