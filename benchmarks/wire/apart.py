"""The raw transfer in processes of its own: what merely sharing the cores costs a thread."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from benchmarks.wire.ends import Pair, Setup
from benchmarks.wire.ways import NEAR, far_main


class Apart:
    """A process that moves messages to another one when told to."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_main, args=(other, setup))
        self._process.start()
        self._pipe.recv()

    def transfer_for(self, seconds: float) -> None:
        """Move messages for so long; returns when the last has arrived."""
        self._pipe.send(seconds)
        self._pipe.recv()

    def close(self) -> None:
        """End both processes."""
        self._pipe.send(None)
        self._process.join()


def _main(pipe: Connection, setup: Setup) -> None:
    near, far = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=far_main, args=(far,))
    process.start()
    pair = Pair(near, setup, NEAR[setup.kind])
    pair.transfer()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pair.transfer()
        pipe.send("done")
    pair.close()
    near.send(None)
    process.join()
