"""The options that the examples share."""

from __future__ import annotations

import argparse
from pathlib import Path

from learner import LearnerConfig


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of a learner; an example may add its own."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--connect", default="127.0.0.1:29400", metavar="HOST:PORT")
    made.add_argument("--learner-id", type=int, default=0)
    made.add_argument("--max-local-steps", type=int)
    made.add_argument("--output-dir", type=Path)
    made.add_argument("--state-dir", type=Path)
    return made


def config_of(options: argparse.Namespace) -> LearnerConfig:
    """What a learner needs to know beside the model."""
    return LearnerConfig(
        connect=options.connect,
        learner_id=options.learner_id,
        fragments=4,
        max_local_steps=options.max_local_steps,
        output_dir=options.output_dir,
        state_dir=options.state_dir,
    )


def own_text(path: str) -> bytes:
    """Something to train on that is there."""
    return Path(path).read_bytes()
