"""The live line on a terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from syncer.display import StatusLine, status_line
from syncer.logs import Progress


def test_the_line_tells_learners_round_and_rate() -> None:
    clock = SimpleNamespace(now=100.0)
    progress = Progress(clock=lambda: 0.0)
    actor = SimpleNamespace(links={1: None, 2: None}, progress=progress)
    line = StatusLine(actor, clock=lambda: clock.now)  # type: ignore[arg-type]

    def text() -> str:
        return line.__rich__().plain

    assert text() == "2 learners · waiting for the first round · 00:00:00"
    record = {"fragment": 1, "responded": [0, 1], "expected": [0, 1], "gnorm": 0.5, "ms": 1}
    progress.committed({**record, "step": 10, "sync_ms": 1})
    text()
    clock.now += 2
    progress.committed({**record, "step": 30, "sync_ms": 1})
    assert text() == (
        "2 learners · round 30 of fragment 1 · 2 of 2 answered · gradient norm 0.5 · "
        "10.0 rounds/s · 00:00:02"
    )


def test_a_terminal_gets_it_and_a_file_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = SimpleNamespace(links={}, progress=Progress())
    with status_line(actor, "text"):  # type: ignore[arg-type]
        pass
    assert capsys.readouterr().err == ""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(
        "syncer.display.Console",
        lambda **_: Console(file=terminal, force_terminal=True, width=100),
    )
    with status_line(actor, "text"):  # type: ignore[arg-type]
        pass
    assert "0 learners · waiting for the first round" in terminal.getvalue()
    with status_line(actor, "json"):  # type: ignore[arg-type]
        pass
