"""Files that a learner leaves for others: layout.json and the final model (L9, L36)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from checkpoint.files import FileSystem, write_atomically
from learner.events import Result
from learner.parameters import Parameters
from wire.layout import NamedLayout

RESULT_FORMAT = "yeto-learner-result-v1"
MODEL_FILE = "model.safetensors"
RESULT_FILE = "result.json"


def layout_text(layout: NamedLayout) -> str:
    """The content of `layout.json` (K26)."""
    return layout.to_json()


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically; its directory is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text.encode())


def save_artifact(
    directory: Path, parameters: Parameters, cut: Sequence[Tensor], result: Result
) -> Path:
    """Write `model.safetensors` and `result.json`; returns the path of the former.

    Args:
        directory: made when missing.
        parameters: names, shapes and dtypes of the trainables.
        cut: the final cut, f32; what is saved is its cast to each parameter's dtype (L36, L4).
            Empty on a rank that writes nothing.
        result: goes into the JSON.
    """
    if not cut:
        return directory / MODEL_FILE
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        slot.name: slot.of(final).to(slot.parameter.dtype).contiguous()
        for fragment, final in enumerate(cut)
        for slot in parameters.slots(fragment)
    }
    document = {"format": RESULT_FORMAT, **asdict(result)}
    _replace(directory / MODEL_FILE, save(tensors, {"format": "pt"}))
    _replace(directory / RESULT_FILE, (json.dumps(document, indent=1) + "\n").encode())
    return directory / MODEL_FILE


def _replace(path: Path, data: bytes) -> None:
    write_atomically(FileSystem(), path, path.with_name(path.name + ".tmp"), [data])
