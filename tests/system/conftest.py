"""Processes of a test are gone when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncer.warmup import warm_up
from tests.system.client import Client, Syncer
from wire.dtypes import DType
from wire.layout import MergeMode


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    """Claims about seconds are not about the one time that a machine compiles the merge."""
    for dtype in DType:
        for heloco in (False, True):
            warm_up(dtype, frozenset(MergeMode), heloco)


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Callable[..., Syncer]]:
    """Starts `yeto-syncer` with options; all in one directory."""
    started: list[Syncer] = []

    def start(*arguments: str, wait: bool = True, patch: str | None = None) -> Syncer:
        process = Syncer(tmp_path, *arguments, wait=wait, patch=patch)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def join() -> Iterator[Callable[..., Client]]:
    """Connects scripted clients: `join(syncer, learner_id, ...)`."""
    joined: list[Client] = []

    def connect(process: Syncer, learner_id: int = 0, **options: object) -> Client:
        client = Client(process.port, learner_id, **options)  # type: ignore[arg-type]
        joined.append(client)
        return client

    yield connect
    for client in joined:
        client.close()
