"""Durable local state: one consistent cut of a learner per directory (L50-L53).

    <state_dir>/step-<local_step>/tensors.safetensors    trainables, buffers, optimizer, anchors
                                  state.msgpack          everything else, and the tensors' hash

A directory is written under a temporary name, synced, renamed, and its parent synced; the last two
are kept. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from checkpoint.files import FileSystem, write_new
from learner.errors import StateMismatch, StateUnreadable
from learner.fragments import Anchor
from learner.parameters import Parameters, local_part
from learner.rng import restore_rng, rng_state
from learner.trees import load_optimizer, pack, unpack

log = logging.getLogger(__name__)

FORMAT = "yeto-learner-state-v1"
TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.msgpack"
KEPT = 2
_NAME = re.compile(r"step-([0-9]+)")


class Stateful(Protocol):
    """A scheduler, or whatever knows the position in the data.

    Its state may hold numbers, text, bytes, None, lists, tuples, dicts and tensors.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue from a state."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state a directory holds (L51)."""

    learner_id: int
    fingerprint: bytes
    contract: bytes
    dtype: str

    def shown(self) -> dict[str, str]:
        """Field -> text, for a comparison that a person reads."""
        return {
            "learner id": str(self.learner_id),
            "layout fingerprint": self.fingerprint.hex()[:16],
            "session contract": self.contract.hex()[:16],
            "wire dtype": self.dtype,
        }


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot on its way to the disk: plain values and CPU tensors nobody writes to."""

    local_step: int
    document: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Saved:
    """A directory that verified."""

    path: str
    local_step: int
    units: int
    anchors: dict[int, Anchor[Tensor]]
    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class LocalState:
    """Takes and restores the state of one training process."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None,
        data: Stateful | None,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._parts: dict[str, Stateful | torch.optim.Optimizer | None] = {
            "optimizer": optimizer,
            "scheduler": scheduler,
            "data": data,
        }

    def snapshot(
        self,
        local_step: int,
        units: int,
        anchors: Sequence[Anchor[Tensor] | None],
        alpha: float,
    ) -> Cut:
        """Copy everything that training changes; anchors are shared, they never change (L51)."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.named():
            pack(parameter, tensors, f"model/{name}")
        for name, value in self._buffers().items():
            pack(value, tensors, f"buffer/{name}")
        fragments: list[dict[str, Any] | None] = []
        for index, anchor in enumerate(anchors):
            if anchor is not None:
                tensors[f"anchor/{index}"] = anchor.values.float()
            fragments.append(None if anchor is None else _anchor_document(anchor))
        document = {
            "format": FORMAT,
            "alpha": alpha,
            "local_step": local_step,
            "units": units,
            "fragments": fragments,
            "rng": rng_state(),
        }
        for name, part in self._parts.items():
            document[name] = None if part is None else pack(part.state_dict(), tensors, name)
        return Cut(local_step, document, tensors)

    def restore(self, saved: Saved) -> None:
        """Put a saved cut back into the model, the optimizer and the generators."""
        with torch.no_grad():
            for name, value in self._parameters.named():
                local_part(value).copy_(saved.tensors[f"model/{name}"])
            for name, buffer in self._buffers().items():
                if (kept := saved.tensors.get(f"buffer/{name}")) is not None:
                    buffer.copy_(kept)
        for name, part in self._parts.items():
            packed = saved.document.get(name)
            if part is None or packed is None:
                continue
            state = unpack(packed, saved.tensors)
            if isinstance(part, torch.optim.Optimizer):
                load_optimizer(part, state)
            else:
                part.load_state_dict(state)
        restore_rng(saved.document["rng"])

    def _buffers(self) -> dict[str, Tensor]:
        """Persistent buffers: not synchronised, but part of a local process's state."""
        names = {name for name, _ in self._model.named_buffers()}
        return {name: value for name, value in self._model.state_dict().items() if name in names}


class StateStore:
    """The directory of one learner. `save` writes in a thread of its own."""

    def __init__(self, root: Path, identity: Identity, files: FileSystem | None = None) -> None:
        self._root = root
        self._identity = identity
        self._files = files or FileSystem()
        self._writer = ThreadPoolExecutor(1, "learner-state")
        self._running: Future[None] | None = None
        self._good: list[int] = []
        """Steps whose directories this process has read or written, oldest first."""

    @property
    def busy(self) -> bool:
        """A save is being written."""
        return self._running is not None and not self._running.done()

    def save(self, cut: Cut, saved: Callable[[str], None]) -> None:
        """Start writing; `saved(path)` is called by the writing thread when it is durable."""
        self.wait()
        self._running = self._writer.submit(self._write_logged, cut, saved)

    def wait(self) -> None:
        """Until the save in progress, if any, has ended."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """Finish writing and end the thread."""
        self._writer.shutdown(wait=True)

    def load(self) -> Saved | None:
        """The newest directory that verifies, or None when there is none at all (L51).

        Raises:
            StateMismatch: it belongs to another learner, model, run or dtype.
            StateUnreadable: there are saves, and none of them verifies.
        """
        steps = self.steps()
        for step in reversed(steps):
            saved = self.load_step(step)
            if saved is not None:
                return saved
        if steps:
            raise self.unreadable()
        return None

    def load_step(self, step: int) -> Saved | None:
        """The save of one step, or None when it does not verify, which is logged.

        Raises:
            StateMismatch: see `load`.
        """
        directory = self._root / f"step-{step}"
        try:
            saved = _read(directory)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.warning("the saved state %s does not verify: %s", directory, error)
            return None
        self._check_identity(directory, saved.document)
        self._good = [step]
        return saved

    def unreadable(self) -> StateUnreadable:
        """What to raise when no save is of use."""
        return StateUnreadable(
            f"no save in {self._root} verifies; move the directory away to start this learner "
            "afresh"
        )

    def steps(self) -> list[int]:
        """Steps of the complete directories, ascending."""
        if not self._root.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self._root.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def _check_identity(self, directory: Path, document: Mapping[str, Any]) -> None:
        theirs = Identity(
            learner_id=document["learner_id"],
            fingerprint=document["fingerprint"],
            contract=document["contract"],
            dtype=document["dtype"],
        )
        if theirs == self._identity:
            return
        ours, found = self._identity.shown(), theirs.shown()
        differing = "; ".join(
            f"{field} {found[field]}, ours is {ours[field]}"
            for field in ours
            if found[field] != ours[field]
        )
        raise StateMismatch(f"the state in {directory} is another learner's: {differing}")

    def _write_logged(self, cut: Cut, saved: Callable[[str], None]) -> None:
        try:
            path = self._write(cut)
        except OSError as error:
            # Training is worth more than its backup: the next save tries again.
            log.error("the local state of step %d was not saved: %s", cut.local_step, error)
        else:
            saved(str(path))

    def _write(self, cut: Cut) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        final = self._root / f"step-{cut.local_step}"
        temporary = self._root / f".step-{cut.local_step}.tmp"
        for left in self._root.glob(".step-*.tmp"):  # of a process that was killed
            shutil.rmtree(left)
        temporary.mkdir()
        data = save(cut.tensors)
        document = {
            **cut.document,
            "learner_id": self._identity.learner_id,
            "fingerprint": self._identity.fingerprint,
            "contract": self._identity.contract,
            "dtype": self._identity.dtype,
            "tensors_blake2b": _digest(data),
        }
        write_new(self._files, temporary / TENSORS_FILE, [data])
        write_new(self._files, temporary / STATE_FILE, [msgpack.packb(document)])
        self._files.sync_directory(temporary)
        if final.exists():
            # A process restarted from an older save writes this step again.
            shutil.rmtree(final)
        self._files.rename(temporary, final)
        self._files.sync_directory(self._root)
        self._prune(cut.local_step)
        return final

    def _prune(self, written: int) -> None:
        """Keep the last two that are known to be good.

        A directory of a later step does not verify on every rank, or training would have started
        from it; it does not count, and goes when training has passed its step.
        """
        self._good = [*(step for step in self._good if step != written), written][-KEPT:]
        for step in self.steps():
            if step <= written and step not in self._good:
                shutil.rmtree(self._root / f"step-{step}")


def _anchor_document(anchor: Anchor[Tensor]) -> dict[str, Any]:
    return {
        "version": anchor.version,
        "digest": anchor.digest,
        "local_step": anchor.local_step,
        "units": anchor.units,
    }


def _read(directory: Path) -> Saved:
    document = msgpack.unpackb((directory / STATE_FILE).read_bytes(), strict_map_key=False)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{STATE_FILE} is not a {FORMAT} document")
    data = (directory / TENSORS_FILE).read_bytes()
    if _digest(data) != document["tensors_blake2b"]:
        raise ValueError(f"{TENSORS_FILE} does not match the hash in {STATE_FILE}")
    tensors = load(data)
    anchors = {
        index: Anchor(
            entry["version"],
            entry["digest"],
            tensors[f"anchor/{index}"],
            entry["local_step"],
            entry["units"],
        )
        for index, entry in enumerate(document["fragments"])
        if entry is not None
    }
    return Saved(
        path=str(directory),
        local_step=document["local_step"],
        units=document["units"],
        anchors=anchors,
        document=document,
        tensors=tensors,
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
