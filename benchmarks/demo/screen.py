"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.demo.programs import Line
from benchmarks.demo.record import ALONE, RunRecord
from syncer.tape import CommitRecord

_SHOWN_ELSEWHERE = {"progress", "round", "evaluation"}


class Screen:
    """Shows a run as it goes; `started` is in Unix seconds, `took` in seconds since then."""

    def __init__(self, run: RunRecord, started: float) -> None:
        self.console = Console(highlight=False)
        self._run = run
        self._started = started
        self._live = Live(console=self.console, transient=True, auto_refresh=False)

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def line(self, line: Line) -> None:
        """Prints what is worth reading of a program's line."""
        if line.event == "evaluation" and not self.console.is_terminal:
            fields = line.fields
            self._print(
                line.ts,
                f"{line.program}: step {fields['local_step']}, "
                f"held-out loss {fields['held_out_loss']:.3f}",
            )
        elif line.event not in _SHOWN_ELSEWHERE and line.message:
            self._print(line.ts, f"{line.program}: {line.message}")

    def commit(self, record: CommitRecord) -> None:
        """Prints one committed round, unless the live table shows it."""
        if self.console.is_terminal:
            return
        stale = ", ".join(str(responder.staleness) for responder in record.responders)
        self._print(
            record.ts,
            f"round {record.step}, fragment {record.fragment}: "
            f"{len(record.responded)} of {len(record.expected)} answered, "
            f"staleness {stale}, {record.ms} ms",
        )

    def refresh(self, took: float) -> None:
        """Draws the live table again; does nothing without a terminal."""
        if self.console.is_terminal:
            self._live.update(self._table(took), refresh=True)

    def _print(self, ts: float, text: str) -> None:
        self.console.print(f"{ts - self._started:6.1f} s  {text}", markup=False, soft_wrap=True)

    def _table(self, took: float) -> Table:
        run = self._run
        title = f"{took:.0f} s   {len(run.rounds)} rounds"
        if run.rounds:
            last = run.rounds[-1]
            title += f"   {len(last.responded)} of {len(last.expected)} answered the last"
        table = Table(title=title, title_justify="left")
        table.add_column("learner")
        for name in (
            "step", "tokens/s", "training loss", "held-out loss", "answers", "staleness", "pushed"
        ):  # fmt: skip
            table.add_column(name, justify="right")
        for number, (name, learner) in enumerate(run.learners.items()):
            stale = run.staleness(number)
            table.add_row(
                name,
                str(learner.local_step),
                f"{learner.tokens_per_s:,.0f}",
                "" if learner.training_loss is None else f"{learner.training_loss:.3f}",
                f"{learner.last_loss:.3f}" if learner.held_out else "",
                str(run.answers(number)),
                "" if stale is None else str(stale),
                f"{learner.push_bytes / 1e6:.1f} MB",
            )
        if run.alone is not None:
            loss = f"{run.alone.last_loss:.3f}" if run.alone.held_out else ""
            table.add_row(
                ALONE, str(run.alone.local_step), f"{run.alone.tokens_per_s:,.0f}", "", loss
            )
        return table
