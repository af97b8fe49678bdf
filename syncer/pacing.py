"""Estimates of time, and what follows from them: grace and the launch floor (C13 to C17)."""

from __future__ import annotations

from syncer.config import CoordinatorConfig


class Ema:
    """Exponential moving average with weight one half; the first sample seeds it (C15)."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """value <- sample / 2 + value / 2."""
        self.value = sample if self.value is None else 0.5 * sample + 0.5 * self.value


class StepEstimate:
    """ξ_step of one generation: seconds per local step, measured at arrival times (C14)."""

    __slots__ = ("_average", "_reference")

    def __init__(self) -> None:
        self._average = Ema()
        self._reference: tuple[float, int] | None = None

    @property
    def seconds(self) -> float | None:
        """The estimate, None until the local step has grown once."""
        return self._average.value

    def observe(self, arrived: float, local_step: int) -> None:
        """A PUSH or HEARTBEAT with this local step came at `arrived` (seconds).

        The reference only moves when the step grew, so that a learner that reports one step
        twice is not taken for a fast one.
        """
        if self._reference is None:
            self._reference = (arrived, local_step)
            return
        since, step = self._reference
        if local_step > step:
            # Two sockets may deliver out of order: time never runs backwards for an estimate.
            self._average.add(max(0.0, arrived - since) / (local_step - step))
            self._reference = (arrived, local_step)


def grace_seconds(
    config: CoordinatorConfig, step: float | None, quorum: float, sync: float
) -> float:
    """How long to wait for the rest once the quorum has answered (C17).

    Args:
        config: cap, γ and τ.
        step: ξ_step of the round, None when unknown.
        quorum: ξ_quorum, this round's sample included.
        sync: ξ_sync, 0 before the first commit.
    """
    if step is None:
        return config.grace_cap
    slack = config.grace_gamma * (config.grace_tau * step - quorum - sync)
    return min(config.grace_cap, max(0.0, slack))


def launch_interval(config: CoordinatorConfig, step: float | None, fragments: int) -> float:
    """Least seconds from one launch to the next: max(interval, H·ξ_step/F) (C13)."""
    if step is None or config.sync_interval_steps == 0:
        return config.min_round_interval
    return max(config.min_round_interval, config.sync_interval_steps * step / fragments)
