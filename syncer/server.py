"""The daemon: listener, signals, the run, and an orderly end (C4, C80 to C84)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator

from syncer.actor import Actor
from syncer.commands import Finish
from syncer.coordinator import Coordinator
from syncer.display import status_line
from syncer.door import Door, reload_certificates, tls_door, warn_of_exposure
from syncer.events import StopSignal
from syncer.launch import (
    Launched,
    StartRefused,
    coordinator_config,
    launch,
    raise_descriptor_limit,
)
from syncer.links import Link
from syncer.logs import LOGGER
from syncer.options import SyncerOptions, WorkerTimeouts
from syncer.ready import ReadyFile
from syncer.recorder import TapeFailed
from syncer.services import Services
from syncer.workers import Workers
from wire import cli_support as cs
from wire.accept import Acceptor
from wire.frames import PROTOCOL_VERSION
from wire.group import Timeouts
from wire.loop import new_event_loop
from wire.replay import ReplayGuard

CLOSE_SECONDS = 2.0
"""Longest wait for groups that are being closed with an ERROR (W38 lingers 1 s)."""


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(
    options: SyncerOptions, timeouts: WorkerTimeouts, loop_factory: LoopFactory = new_event_loop
) -> int:
    """One run of the syncer, from the lock to the exit code (C84)."""
    try:
        launched = launch(options, timeouts)
        with launched.cleanup:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                code = runner.run(serve(launched))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a late one must not change the exit code
            return code
    except StartRefused as error:
        LOGGER.error("%s", error)
        return 2


async def serve(launched: Launched) -> int:
    """Listen, run until the core says `Finish`, close everything.

    Raises:
        StartRefused: the address can't be bound, or the ready file can't be written.
    """
    loop = asyncio.get_running_loop()
    options = launched.options
    workers = Workers()
    services = Services(
        store=launched.store,
        svd=launched.svd,
        drain_svd=launched.drain_svd,
        write_final_state=launched.write_final_state,
        tape=launched.tape,
        heloco=options.delta_correction == "heloco",
    )
    protection = launched.protection
    replays = ReplayGuard() if protection.closed else None
    core = Coordinator(coordinator_config(options), launched.take_resumed(), replays)
    actor = Actor(core, services, workers, loop)
    launched.alarm.connect(actor.fail_from_thread)
    stops = Stops(actor)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stops.came)
    if protection.tls is not None:
        loop.add_signal_handler(signal.SIGHUP, reload_certificates, protection.tls, workers)
    acceptor = _acceptor(launched, actor, workers)
    try:
        host, port = await _listen(acceptor, options)
        try:
            _announce(launched, host, port)
            with _ready_file(options, host, port, launched.profile):
                _record_resume(launched, actor)
                with status_line(actor, options.log_format):
                    return await _until_finished(actor, acceptor, stops)
        finally:
            acceptor.close()
    finally:
        workers.shutdown()


def _acceptor(launched: Launched, actor: Actor, workers: Workers) -> Acceptor:
    options = launched.options
    connections = raise_descriptor_limit(options.max_connections)
    if connections < options.max_connections:
        LOGGER.warning(
            "this system allows %d sockets, fewer than --max-connections %d",
            connections,
            options.max_connections,
        )
    door = Door(actor, options.learners, workers, launched.protection)
    return Acceptor(
        door,
        learners=options.learners,
        executor=workers.wire,
        timeouts=Timeouts(
            handshake=options.handshake_timeout_s,
            heartbeat=options.heartbeat_timeout_s,
            stall=options.stall_timeout_s,
        ),
        max_connections=max(1, connections),
        tls=tls_door(launched.protection),
        report_bad_budget=options.learner_budget_steps is not None,
        report=door.report,
    )


async def _listen(acceptor: Acceptor, options: SyncerOptions) -> tuple[str, int]:
    try:
        return await acceptor.listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host} port {options.port}"
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is in use: stop who listens there, or give another --port"
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            text = f"--host {options.host} is no address of this machine: {error.strerror}"
        elif error.errno == errno.EACCES:
            text = f"{where} needs more rights: give a --port of 1024 or more"
        else:
            text = f"can't listen on {where}: {error}"
        raise StartRefused(text) from error


@contextlib.contextmanager
def _ready_file(options: SyncerOptions, host: str, port: int, profile: bytes) -> Iterator[None]:
    if options.ready_file is None:
        yield
        return
    ready = ReadyFile(options.ready_file)
    try:
        ready.write(host, port, profile)
    except OSError as error:
        raise StartRefused(
            f"--ready-file {options.ready_file} can't be written: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        ready.remove()


def _announce(launched: Launched, host: str, port: int) -> None:
    options = launched.options
    resumption = launched.resumption
    for text in (*options.warnings, *launched.protection.warnings):
        LOGGER.warning("%s", text)
    warn_of_exposure(launched.protection)
    cs.log_event(
        LOGGER,
        logging.INFO,
        "listening",
        f"listening on {host} port {port}, quorum {options.quorum} of {options.learners} ids, "
        f"checkpoint {options.checkpoint_path}, semantic_profile_sha256={launched.profile.hex()}",
        host=host,
        port=port,
        semantic_profile_sha256=launched.profile.hex(),
    )
    if resumption is not None:
        cs.log_event(
            LOGGER,
            logging.INFO,
            "resuming",
            f"resuming step {resumption.step} of {options.checkpoint_path} "
            f"({'verified' if resumption.verified else 'unverified'}) with outer lr "
            f"{options.outer_lr_by_fragment or options.outer_lr}, momentum "
            f"{options.outer_momentum}, correction {options.delta_correction}",
            step=resumption.step,
            verified=resumption.verified,
        )


def _record_resume(launched: Launched, actor: Actor) -> None:
    """C43: says which rounds the tape has lost, if any."""
    if launched.resumption is not None:
        actor.record(
            {
                "event": "resume",
                "protocol_version": PROTOCOL_VERSION,
                "checkpoint_step": launched.resumption.step,
                "tape_step": launched.resumption.tape_step,
            }
        )


class Stops:
    """The signals of a run, also those that come when the core has finished.

    Attributes:
        count: how many have come.
    """

    def __init__(self, actor: Actor) -> None:
        self.count = 0
        self._actor = actor

    def came(self) -> None:
        """SIGINT or SIGTERM."""
        self.count += 1
        self._actor.post(StopSignal())


async def _until_finished(actor: Actor, acceptor: Acceptor, stops: Stops) -> int:
    finish = await actor.finished
    acceptor.close()
    await _close_groups(list(actor.links.values()), finish)
    code, reason = finish.code, finish.reason
    try:
        await actor.settle()
    except TapeFailed as error:  # its last records (C35)
        code, reason = code or 1, reason or str(error)
    if not code and stops.count > 1:  # C86: also while the last sockets are being closed
        code, reason = 1, "a second signal came while the run was ending; all of it is written"
    if code:
        LOGGER.error("%s", reason)
    return code


async def _close_groups(links: list[Link], finish: Finish) -> None:
    """Let what is queued out, or say why it ends; then close (C65, C82, C83)."""
    if finish.error is None and finish.flush_seconds > 0 and links:
        flushing = [asyncio.ensure_future(link.group.finish()) for link in links]
        await asyncio.wait(flushing, timeout=finish.flush_seconds)
        for task in flushing:
            task.cancel()
    for link in links:
        link.close(finish.error)
    closing = [asyncio.ensure_future(link.group.wait_closed()) for link in links]
    if closing:
        _, late = await asyncio.wait(closing, timeout=CLOSE_SECONDS)
        for task in late:
            task.cancel()
