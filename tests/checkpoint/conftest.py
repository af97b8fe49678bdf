"""Folders for tests: in memory where there is one, because thousands of fsyncs cost minutes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the disk."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory: links, locks, renames and killed processes are the same there."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("checkpoint")
        return
    with tempfile.TemporaryDirectory(prefix="yeto-test-", dir=MEMORY) as folder:
        yield Path(folder)
