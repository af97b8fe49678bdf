"""The event loop of both programs: uvloop where it exists, else asyncio's own."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A fresh loop of the fastest kind there is."""
    if importlib.util.find_spec("uvloop") is None:  # not on this platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    return loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on `new_event_loop`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
