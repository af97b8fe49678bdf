"""Ends of a run that are not the end of training: signals, and exit 1 with a checkpoint (C80-C83).

The caller has discarded the open rounds before it asks for a checkpoint here.
"""

from __future__ import annotations

from syncer.commands import DrainPool, SaveKind
from syncer.context import FINALIZING, Context, Phase
from syncer.events import TaskDone
from syncer.saving import SaveJob, Saver
from wire.errors import ErrorCode, ProtocolError


def drain(ctx: Context, now: float) -> float:
    """C80: no launch any more; open rounds may finish until the returned time."""
    ctx.phase = Phase.DRAIN
    ctx.log(
        "info",
        f"stopping: open rounds may finish for {ctx.config.quorum_timeout:g} s, "
        "then the run is finalized; a second signal ends it now",
    )
    return now + ctx.config.quorum_timeout


def stop_before_start(ctx: Context) -> None:
    """C82: nothing to finalize, the file at the path stays as it is."""
    text = "stopped by a signal before the first round"
    error = ProtocolError(ErrorCode.STOPPED, text)
    if ctx.config.mark_final:
        ctx.finish(f"{text}: there is no final checkpoint to mark", error)
    else:
        ctx.log("info", text)
        ctx.finish(error=error)


def stop_now(ctx: Context, saver: Saver) -> None:
    """C81: the second signal. Once finalizing, learners are told (phase FAIL)."""
    text = "stopped by a second signal"
    error = ProtocolError(ErrorCode.STOPPED, text) if ctx.phase in FINALIZING else None
    if ctx.phase in (Phase.DELIVER, Phase.DONE):
        ctx.finish(f"{text}: the terminal checkpoint is written, but unmarked", error)
    else:
        end(ctx, saver, text, error)


def stop_budget(ctx: Context, saver: Saver) -> None:
    """C83: a checkpoint only while the gate is open."""
    text = "stopped by a signal in budget mode"
    error = ProtocolError(ErrorCode.STOPPED, text)
    if ctx.phase is Phase.CUTOFF:
        ctx.finish(text, error)
    else:
        end(ctx, saver, text, error)


def end(
    ctx: Context,
    saver: Saver,
    reason: str,
    error: ProtocolError | None = None,
    *,
    drain: bool = False,
) -> None:
    """Exit 1 after an unmarked checkpoint of the last committed cut (C75, C81, C83).

    Args:
        reason: the line on stderr.
        error: what every connected group is told.
        drain: wait for the SVD pool first; a signal does not.
    """
    ctx.phase = Phase.ENDING
    if ctx.model is None or ctx.session is None:
        ctx.finish(reason, error)
        return
    cut = ctx.model.snapshot(ctx.session, ctx.config.iso_backend)

    def written(now: float) -> None:
        ctx.finish(f"{reason}; the checkpoint holds step {cut.global_step}", error)

    def failed(why: str) -> None:
        ctx.finish(f"{reason}; the checkpoint could not be written: {why}", error)

    job = SaveJob(SaveKind.RECOVERY, cut, written, failed)
    if drain:

        def drained(answer: TaskDone, now: float) -> None:
            saver.submit(job)

        ctx.ask(DrainPool, drained)
    else:
        saver.submit(job)
