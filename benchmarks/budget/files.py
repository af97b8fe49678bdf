"""Reading what the processes of a case left: checkpoints, layouts, frozen states, models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.budget.checks import CheckpointFacts
from benchmarks.budget.plan import Expected
from checkpoint.format import ledger_mapping
from checkpoint.inspection import inspect_file
from checkpoint.names import Names
from checkpoint.resume import load_resume_file
from checkpoint.snapshot import FragmentState
from learner.state import Identity, Saved, StateStore
from wire.layout import NamedLayout

EXPORT_TIMEOUT_S = 120.0
SCALAR = 0
"""Iso backend id of every arm (K1)."""


class CaseFailed(Exception):
    """A case cannot go on; the text says what happened."""


def checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read a checkpoint and everything beside it.

    Raises:
        CheckpointRefused: it is not even readable.
    """
    found = inspect_file(path)
    names = found.names
    temporary = (names.spare, names.previous, names.sums_temporary, names.marker_temporary)
    return CheckpointFacts(
        step=found.structure.header.global_step,
        versions=tuple(head.version for head in found.structure.fragments),
        ledger=ledger_mapping(found.structure.ledger),
        fingerprint=found.fingerprint,
        contract=found.structure.trailer.contract,
        problems=tuple(str(problem) for problem in found.problems()),
        verified=found.integrity == "verified",
        marked=found.marked_final,
        has_marker=names.marker.exists(),
        leftovers=tuple(item.name for item in temporary if item.exists()),
    )


def checkpoint_state(path: Path) -> Sequence[FragmentState]:
    """Params and momentum of every fragment, after all checks of K16."""
    return load_resume_file(Names(path), SCALAR, None).fragments


def common_layout(paths: Sequence[Path]) -> NamedLayout:
    """The layout that all learners wrote.

    Raises:
        CaseFailed: they did not write the same.
    """
    layouts = [NamedLayout.from_json(path.read_text()) for path in paths]
    if any(layout.fingerprint != layouts[0].fingerprint for layout in layouts):
        raise CaseFailed("the learners wrote different layouts")
    return layouts[0]


def frozen_state(directory: Path, learner: int, dtype: str, expected: Expected) -> Saved:
    """The durable state that a learner saved before its final acknowledgement (L53).

    Raises:
        CaseFailed: there is none.
    """
    identity = Identity(learner, expected.fingerprint, expected.contract, dtype)
    store = StateStore(directory, identity)
    try:
        saved = store.load()
    finally:
        store.close()
    if saved is None:
        raise CaseFailed(f"learner {learner} saved no state in {directory}")
    return saved


def frozen_tensors(saved: Saved) -> dict[str, Tensor]:
    """Name -> f32 values of the trainables."""
    prefix = "model/"
    return {
        name.removeprefix(prefix): tensor.float()
        for name, tensor in saved.tensors.items()
        if name.startswith(prefix)
    }


def export_model(checkpoint: Path, out: Path, layout: Path) -> dict[str, Tensor]:
    """`yeto-checkpoint export` of a marked checkpoint, as a user would run it.

    Raises:
        CaseFailed: it was refused.
    """
    command = Path(sys.executable).with_name("yeto-checkpoint")
    flags = [f"--layout={layout}", "--require-final", "--force"]
    done = subprocess.run(
        [str(command), "export", str(checkpoint), str(out), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=EXPORT_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise CaseFailed(f"the export was refused: {done.stderr.strip()}")
    return load_file(out)


def learner_results(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The final model and the JSON beside it (L36)."""
    document = json.loads((directory / "result.json").read_text())
    return load_file(directory / "model.safetensors"), dict(document)
