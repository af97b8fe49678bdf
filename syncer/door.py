"""The way from a stranger's first frame to the core: seals, certificates, HELLOs (W12, S2, S12)."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from syncer.actor import Actor
from syncer.logs import LOGGER
from syncer.protection import Protection
from syncer.workers import Workers, submit
from wire.accept import Newcomer
from wire.connection import FREE_HELLO_BYTES
from wire.errors import ErrorCode, ProtocolError
from wire.frames import Role
from wire.layout import NumericLayout, parse_layout
from wire.limits import check_limits_fit
from wire.messages import Hello
from wire.security import INSECURE_WARNING_EVERY_S, open_hello
from wire.tls import PeerCertificate, SyncerTls, check_identity
from wire.tls_stream import TlsDoor

INLINE_HELLO = FREE_HELLO_BYTES
"""Bytes; a larger HELLO is read in a thread, one at a time."""


class Door:
    """Reads HELLOs (steps 0 to 9 of W12) and hands them to the actor."""

    def __init__(
        self, actor: Actor, learners: int, workers: Workers, protection: Protection
    ) -> None:
        self._actor = actor
        self._learners = learners
        self._workers = workers
        self._keys = protection.keys
        self._layouts = LayoutMemo()

    def on_hello(self, newcomer: Newcomer, payload: memoryview) -> None:
        """A complete HELLO payload came; a large one is read in a thread."""
        read = partial(self._read, payload, newcomer.certificate)
        if len(payload) > INLINE_HELLO:
            answer = partial(self._answer, newcomer)
            submit(asyncio.get_running_loop(), self._workers.hello, read, answer)
            return
        future: Future[Hello] = Future()
        try:
            future.set_result(read())
        except ProtocolError as error:
            future.set_exception(error)
        self._answer(newcomer, future)

    def report(self, text: str) -> None:
        """Strangers who do not speak as this port does (S13)."""
        self._actor.log.log(logging.WARNING, "stranger", text)

    def _read(self, payload: memoryview, certificate: PeerCertificate | None) -> Hello:
        """Steps 0 to 9 of W12 and S12; a small HELLO on the loop, a large one in its thread.

        Raises:
            ProtocolError: with the code of the first failing step.
        """
        layouts = self._layouts if len(payload) > INLINE_HELLO else parse_layout
        hello = open_hello(self._keys, payload, self._learners, layouts)
        check_limits_fit(hello.layout, hello.dtype)
        check_identity(certificate, hello.learner_id)
        return hello

    def _answer(self, newcomer: Newcomer, future: Future[Hello]) -> None:
        newcomer.payload_read()
        error = future.exception()
        if newcomer.gone:
            return
        if error is None:
            self._actor.hello(newcomer, future.result())
        elif isinstance(error, ProtocolError):
            self._actor.refuse(newcomer, error)
        elif isinstance(error, MemoryError):
            refusal = ProtocolError(ErrorCode.OUT_OF_MEMORY, "no memory to read this HELLO")
            self._actor.refuse(newcomer, refusal)
        else:
            raise error


class LayoutMemo:
    """`parse_layout` for one thread that knows the layout it read last, while someone uses it.

    The learners of a run all send the same one. A second reading of a layout of a million
    fragments would take seconds, and memory for as long as that learner is connected.
    """

    def __init__(self) -> None:
        self._raw = b""
        self._layout: Callable[[], NumericLayout | None] = lambda: None

    def __call__(self, data: memoryview, count: int) -> tuple[NumericLayout, int]:
        """See `wire.layout.parse_layout`."""
        layout, used = self._layout(), len(self._raw)
        if layout is not None and len(layout) == count and bytes(data[:used]) == self._raw:
            return layout, used
        layout, used = parse_layout(data, count)
        self._raw, self._layout = bytes(data[:used]), weakref.ref(layout)
        return layout, used


def tls_door(protection: Protection) -> TlsDoor | None:
    """TLS on every socket, with the certificates that are current when it connects (S14)."""
    tls = protection.tls
    return None if tls is None else TlsDoor(Role.SYNCER, lambda: tls.context)


def reload_certificates(tls: SyncerTls, workers: Workers) -> None:
    """S14: use the files as they are now for connections to come; loop thread only."""

    def answer(future: Future[None]) -> None:
        error = future.exception()
        if error is None:
            LOGGER.info("certificates were read again; connections to come use them")
        else:
            LOGGER.warning("certificates stay as they were: %s", error)

    submit(asyncio.get_running_loop(), workers.drain, tls.reload, answer)


def warn_of_exposure(protection: Protection, every: float = INSECURE_WARNING_EVERY_S) -> None:
    """S20: now, and again every hour as long as the loop runs."""
    if protection.exposed is not None:
        LOGGER.warning("%s", protection.exposed)
        loop = asyncio.get_running_loop()
        loop.call_later(every, warn_of_exposure, protection, every)
