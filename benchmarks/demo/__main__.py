"""Three learners train one small language model through a syncer, as real processes.

`python -m benchmarks.demo` (or `make demo`) leaves in `demo-run/`: the checkpoint with its
marker, the event tape, `model.safetensors`, `demo.png`, `sample.txt` and the log of each program.
It exits with 1 when a program failed, when the held-out loss fell by less than a quarter, or when
the final parameters of a learner differ from the syncer's cut by one bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.demo.picture import draw
from benchmarks.demo.programs import Programs
from benchmarks.demo.record import ALONE, LearnerRecord, RunRecord
from benchmarks.demo.screen import Screen
from benchmarks.task import task_flags
from learner.tasks.bytes_lm import ByteGPT, sample
from syncer.tape import CommitRecord, read_commits

TAPE = "tape.jsonl"
LEAST_ROUNDS = 12
OWN_MARK = ".made-by-yeto-demo"
TICK_S = 0.2
SYNCER_START_S = 60.0
GIVE_UP_AFTER_S = 120.0
MUST_FALL_BY = 0.25
PROMPT = b"def "


@dataclass(frozen=True)
class Sizes:
    """How large the demo is: on two cores it ends after about 100 s by one limit or the other."""

    learners: int = 3
    rounds: int = 300
    seconds: float = 95.0
    sync_interval_steps: int = 12
    fragments: int = 6
    layers: int = 3
    width: int = 96
    heads: int = 4
    seq_len: int = 128
    batch_size: int = 8
    lr: float = 1e-3
    eval_every_steps: int = 25


class DemoFailed(Exception):
    """The run did not do what the demo promises."""


def main() -> int:
    """Runs the demo; the exit code says whether it kept its promises."""
    parser = argparse.ArgumentParser(prog="benchmarks.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-run"), metavar="DIR")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds, help="end after so many")
    parser.add_argument("--seconds", type=float, default=Sizes.seconds, help="or after so long")
    parser.add_argument("--no-baseline", action="store_true", help="without the learner alone")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds, seconds=arguments.seconds)
    console = Console(highlight=False)
    try:
        make_folder(arguments.output)
        tell(console, arguments.output, sizes, baseline=not arguments.no_baseline)
    except DemoFailed as error:
        console.print(f"[bold red]demo failed:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0


def make_folder(folder: Path) -> None:
    """An empty folder; an older demo run in it is removed, anything else is not touched."""
    if (folder / OWN_MARK).exists():
        shutil.rmtree(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DemoFailed(f"{folder} holds files that are not a demo run; choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OWN_MARK).touch()


def tell(console: Console, folder: Path, sizes: Sizes, *, baseline: bool) -> None:
    """The whole story, in order."""
    started = time.time()
    console.print(
        f"One syncer and {sizes.learners} learners, each a process of its own, train one "
        "byte-level GPT on the\nsource text of the standard library"
        f"{', and one more learner trains alone' if baseline else ''}. "
        f"It ends after {sizes.rounds} rounds\nor {sizes.seconds:.0f} s, with the "
        f"syncer's Ctrl-C. Files go to {folder}/.",
        soft_wrap=True,
    )
    torch.set_num_threads(1)
    run = RunRecord({f"learner-{i}": LearnerRecord() for i in range(sizes.learners)})
    run.alone = LearnerRecord() if baseline else None
    train(run, folder, sizes, started)
    check_bits(folder, list(run.learners))
    write_sample(folder, sizes)
    draw(run, folder / "demo.png")
    summarise(console, folder, run, time.time() - started)
    check_losses(run)


def train(run: RunRecord, folder: Path, sizes: Sizes, started: float) -> None:
    """Syncer and learners from start to final cut; fills `run` with what they said."""
    with Programs(folder) as programs, Screen(run, started) as screen:
        port = start_syncer(programs, folder, sizes)
        for number, name in enumerate(run.learners):
            flags = learner_flags(folder / name, sizes, f"127.0.0.1:{port}", number)
            programs.start(name, "yeto-learner", *flags)
        if run.alone is not None:
            flags = learner_flags(folder / ALONE, sizes, "none", 0)
            programs.start(ALONE, "yeto-learner", *flags)
        waiting, stopping = {"syncer", *run.learners}, False
        while waiting or not alone_is_done(run):
            # Before their lines are read, so that the last ones are not left behind.
            ended = {name for name in waiting if ended_well(programs, name)}
            if run.alone is not None:
                ended_well(programs, ALONE)
            for line in programs.lines(TICK_S):
                run.add_line(line)
                screen.line(line)
            for commit in new_commits(folder / TAPE, len(run.rounds)):
                run.rounds.append(commit)
                screen.commit(commit)
            took = time.time() - started
            screen.refresh(took)
            if not stopping and is_over(run, sizes, took):
                programs.signal("syncer", signal.SIGINT)
                stopping = True
            if took > sizes.seconds + GIVE_UP_AFTER_S:
                raise DemoFailed(f"not at the end after {took:.0f} s, {len(run.rounds)} rounds")
            waiting -= ended


def is_over(run: RunRecord, sizes: Sizes, took: float) -> bool:
    """Whether it is time to end the run: enough rounds, or enough time and a few rounds."""
    rounds = len(run.rounds)
    return rounds >= sizes.rounds or (took >= sizes.seconds and rounds >= LEAST_ROUNDS)


def alone_is_done(run: RunRecord) -> bool:
    """Whether the learner alone was evaluated after as many steps as the others did."""
    return run.alone is None or run.alone.evaluated_step >= run.own_steps


def learner_flags(folder: Path, sizes: Sizes, connect: str, number: int) -> list[str]:
    """Flags of one learner of the run, or (`connect` is none) of the one that trains alone."""
    return [
        f"--connect={connect}",
        f"--learner-id={number}",
        *task_flags(sizes),
        "--wire-dtype=f32",
        f"--output-dir={folder}",
        f"--eval-every-steps={sizes.eval_every_steps}",
    ]


def ended_well(programs: Programs, name: str) -> bool:
    """False while it runs.

    Raises:
        DemoFailed: it ended with another code than 0.
    """
    code = programs.exit_code(name)
    if code not in (None, 0):
        raise DemoFailed(f"{name} ended with exit code {code}; see its log")
    return code == 0


def start_syncer(programs: Programs, folder: Path, sizes: Sizes) -> int:
    """Starts the syncer; its port, once it listens."""
    ready = folder / "ready.json"
    programs.start(
        "syncer",
        "yeto-syncer",
        f"--quorum={sizes.learners}",
        "--port=0",
        f"--ready-file={ready}",
        f"--sync-interval-steps={sizes.sync_interval_steps}",
        "--checkpoint-every=1",
        "--mark-final-checkpoint",
        f"--checkpoint-path={folder / 'yeto-state.ckpt'}",
        f"--event-tape={folder / TAPE}",
    )
    deadline = time.monotonic() + SYNCER_START_S
    while not ready.exists():
        list(programs.lines(TICK_S))  # nothing in them belongs to the story yet
        if ended_well(programs, "syncer") or time.monotonic() > deadline:
            raise DemoFailed(f"the syncer was not ready within {SYNCER_START_S:.0f} s")
    return int(json.loads(ready.read_text())["port"])


def new_commits(tape: Path, known: int) -> list[CommitRecord]:
    """What the tape says beyond the first `known` commits, while the syncer appends to it."""
    return read_commits(tape)[known:] if tape.exists() else []


def check_bits(folder: Path, names: list[str]) -> None:
    """Exports the checkpoint to `model.safetensors` and compares every learner with it."""
    export = subprocess.run(
        [
            str(Path(sys.executable).with_name("yeto-checkpoint")),
            "export",
            str(folder / "yeto-state.ckpt"),
            str(folder / "model.safetensors"),
            f"--layout={folder / names[0] / 'layout.json'}",
            "--require-final",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if export.returncode != 0:
        raise DemoFailed(f"the checkpoint could not be exported: {export.stderr.strip()}")
    merged = load_file(folder / "model.safetensors")
    for name in names:
        own = load_file(folder / name / "model.safetensors")
        if own.keys() != merged.keys():
            raise DemoFailed(f"{name} saved other tensors than the syncer's cut has")
        for key, tensor in merged.items():
            if not torch.equal(tensor.view(torch.int32), own[key].view(torch.int32)):
                raise DemoFailed(f"{key} of {name} differs from the syncer's cut")


def write_sample(folder: Path, sizes: Sizes) -> None:
    """Lets the merged model write a little source text."""
    model = ByteGPT(
        layers=sizes.layers, width=sizes.width, heads=sizes.heads, seq_len=sizes.seq_len
    )
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({**tensors, "lm_head.weight": tensors["embed.weight"]})
    text = sample(model, PROMPT, 400, seed=0, temperature=0.7)
    (folder / "sample.txt").write_bytes(PROMPT + text + b"\n")


def summarise(console: Console, folder: Path, run: RunRecord, took: float) -> None:
    """The short table at the end."""
    table = Table(title="held-out loss, nats per byte", title_justify="left")
    for name in ("", "own steps", "at the start", "at the end", "rounds answered", "pushed"):
        table.add_column(name, justify="left" if not name else "right")
    for number, (name, learner) in enumerate(run.learners.items()):
        table.add_row(
            name.replace("-", " "),
            str(learner.local_step),
            f"{learner.first_loss:.3f}",
            f"{learner.held_out[-2][2]:.3f}",
            f"{run.answers(number)} of {len(run.rounds)}",
            f"{learner.push_bytes / 1e6:.1f} MB",
        )
    table.add_row(
        "merged model", "", f"{run.first_loss:.3f}", f"{run.merged_loss:.3f}", style="bold"
    )
    if run.alone is not None:
        table.add_row(
            "alone",
            str(run.own_steps),
            f"{run.alone.first_loss:.3f}",
            f"{run.alone.loss_at(run.own_steps):.3f}",
        )
    console.print(table)
    console.print(
        f"All final models equal the syncer's checkpoint bit for bit. {took:.0f} s.\n"
        f"In {folder}/: model.safetensors, demo.png, sample.txt, tape.jsonl, yeto-state.ckpt",
        soft_wrap=True,
    )


def check_losses(run: RunRecord) -> None:
    """The held-out loss of the merged model must have fallen by a quarter."""
    fell = 1 - run.merged_loss / run.first_loss
    if not fell >= MUST_FALL_BY:
        raise DemoFailed(f"the held-out loss fell by {fell:.0%}, expected {MUST_FALL_BY:.0%}")


if __name__ == "__main__":
    sys.exit(main())
