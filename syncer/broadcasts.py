"""Encoded parameters on their way out: encoded once, off the loop, shared by all links (W46)."""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from syncer.links import Link
from syncer.workers import submit
from wire.dtypes import DType
from wire.messages import Broadcast, FinalFragment, FinalManifest
from wire.tensors import encode

T = TypeVar("T")

INLINE_NUMEL = 64 * 1024
"""Up to so many values are encoded on the spot: shorter than the way to a thread and back."""


@dataclass(slots=True)
class _Encoding:
    """The newest version of one fragment: its message, or who waits for it.

    `encoded` becomes `message` when all that was to be encoded before it has gone out (C9).
    """

    version: int
    params: Tensor
    dtype: DType
    encoded: Broadcast | None = None
    message: Broadcast | None = None
    waiting: list[Link] = field(default_factory=list)


@dataclass(slots=True)
class _Cut:
    params: tuple[Tensor, ...]
    manifest: FinalManifest
    fragments: tuple[FinalFragment, ...] | None = None
    waiting: list[Link] = field(default_factory=list)


class Broadcasts:
    """Keeps one encoded message per fragment (C87) and the final cut.

    `failed` is told when values can't be encoded, which the merge should have refused (N23).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPoolExecutor,
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._failed = failed
        self._latest: dict[int, _Encoding] = {}
        self._encoding: deque[_Encoding] = deque()
        self._cut: _Cut | None = None

    def send(
        self, links: Iterable[Link], fragment: int, version: int, params: Tensor, dtype: DType
    ) -> None:
        """BCAST of `fragment` to `links`, in the bulk `dtype`, as soon as it is encoded."""
        entry = self._latest.get(fragment)
        if entry is None or entry.params is not params or entry.dtype is not dtype:
            entry = _Encoding(version, params, dtype)
            self._latest[fragment] = entry
            self._encode(fragment, entry)
        for link in links:
            link.wanted[fragment] = version
            if entry.message is None:
                entry.waiting.append(link)
            else:
                link.broadcast(entry.message)

    def _encode(self, fragment: int, entry: _Encoding) -> None:
        def job() -> Broadcast:
            return Broadcast(fragment, entry.version, encode(entry.params, entry.dtype))

        def done(future: Future[Broadcast]) -> None:
            error = future.exception()
            if error is not None:
                self._failed(f"fragment {fragment} can't be broadcast: {error}")
                return
            entry.encoded = future.result()
            self._release()

        self._encoding.append(entry)
        self._run(entry.params.numel(), job, done)

    def _release(self) -> None:
        """Send what is encoded, in the order in which it was to be sent."""
        while self._encoding and (message := self._encoding[0].encoded) is not None:
            entry = self._encoding.popleft()
            entry.message = message
            for link in entry.waiting:
                link.broadcast(message)
            entry.waiting.clear()

    def send_cut(
        self,
        link: Link,
        step: int,
        versions: tuple[int, ...],
        params: tuple[Tensor, ...],
        queued: Callable[[Link], None],
    ) -> None:
        """The final cut to one link (C60); `queued` is called once all of it is queued."""
        link.withdraw()
        if self._cut is None or not _same(self._cut.params, params):
            self._cut = _Cut(params, FinalManifest(step, versions))
            self._latest.clear()  # no broadcast follows a cut (C36)
            self._encode_cut(self._cut, queued)
        if self._cut.fragments is None:
            self._cut.waiting.append(link)
        elif link.cut(self._cut.fragments, self._cut.manifest):
            queued(link)

    def _encode_cut(self, cut: _Cut, queued: Callable[[Link], None]) -> None:
        versions = cut.manifest.versions

        def job() -> tuple[FinalFragment, ...]:
            return tuple(
                FinalFragment(index, version, encode(values, DType.F32))
                for index, (version, values) in enumerate(zip(versions, cut.params, strict=True))
            )

        def done(future: Future[tuple[FinalFragment, ...]]) -> None:
            error = future.exception()
            if error is not None:
                self._failed(f"the final cut can't be encoded: {error}")
                return
            cut.fragments = future.result()
            for link in cut.waiting:
                if link.cut(cut.fragments, cut.manifest):
                    queued(link)
            cut.waiting.clear()

        self._run(sum(values.numel() for values in cut.params), job, done)

    def _run(self, numel: int, job: Callable[[], T], done: Callable[[Future[T]], None]) -> None:
        if numel > INLINE_NUMEL:
            submit(self._loop, self._pool, job, done)
            return
        future: Future[T] = Future()
        try:
            future.set_result(job())
        except ValueError as error:  # values that don't fit the wire dtype
            future.set_exception(error)
        done(future)


def _same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
