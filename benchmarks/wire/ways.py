"""The ways by name, and the far process.

Its own module: the far process imports it again, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection

from benchmarks.wire import echo, product, raw
from benchmarks.wire.ends import FarMaker, NearMaker, serve

FAR: Mapping[str, FarMaker] = {
    "raw": raw.far_raw,
    "raw-threads": raw.far_raw,
    "tuned": raw.far_raw,
    "tuned-threads": raw.far_raw,
    "tls-raw": raw.far_tls,
    "tls-raw-threads": raw.far_tls,
    "streamreader": raw.ReaderEnd,
    "gloo": raw.far_gloo,
    "echo": echo.FarEcho,
    "control": echo.FarControl,
    "push": product.FarPush,
    "bcast": product.FarBroadcast,
}
NEAR: Mapping[str, NearMaker] = {
    "raw": raw.near_raw,
    "raw-threads": raw.near_raw,
    "tuned": raw.near_raw,
    "tuned-threads": raw.near_raw,
    "tls-raw": raw.near_tls,
    "tls-raw-threads": raw.near_tls,
    "streamreader": raw.near_raw,
    "gloo": raw.near_gloo,
    "echo": echo.NearEcho,
    "control": echo.NearControl,
    "push": product.NearPush,
    "bcast": product.NearBroadcast,
}


def far_main(pipe: Connection) -> None:
    """The other process."""
    serve(pipe, FAR)
