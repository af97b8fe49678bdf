"""The trainables of a model: found once, read as f32 snapshots, written in place (L1-L4, L26).

Every method that touches a parameter runs under no-grad and leaves gradients, optimizer state and
storages where they are. Fragments are flat f32 vectors: the fragment's tensors, each in logical
row-major order whatever its strides, one after the other in layout order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.errors import LayoutError
from learner.masters import Masters, no_masters, source_of
from learner.staging import CPU, CUDA, Host, pageable
from wire.compiled import compiled
from wire.layout import NamedLayout, TensorSpec

_LEADING = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ANYWHERE = frozenset(_LEADING[1:])
_SLICE = 1 << 20
PIECE = 1 << 17
"""Values that are widened at a time: 512 KiB, which stay in the cache."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@compiled
def _blend_in_place(
    local: NDArray[np.float32],
    incoming: NDArray[np.float32],
    local_share: np.float32,
    global_share: np.float32,
) -> None:
    """Two products and one sum, each rounded to f32, in one pass over memory (L26)."""
    for index in range(local.size):
        local[index] = local_share * local[index] + global_share * incoming[index]


def normalize_name(name: str) -> str:
    """Remove what wrappers add to a parameter's name (L3); the last component always stays."""
    *parents, leaf = name.split(".")
    while parents and parents[0] in _LEADING:
        del parents[0]
    return ".".join([part for part in parents if part not in _ANYWHERE] + [leaf])


def find_trainables(model: nn.Module, *, sharded: bool = False) -> dict[str, nn.Parameter]:
    """The synchronised set, normalised name -> parameter, in registration order (L1-L3).

    A parameter that shares storage, shape and strides with an earlier one is left out: writing
    the first one updates every alias.

    Args:
        model: whose parameters.
        sharded: allow DTensor parameters (FSDP2), which need all ranks of an island.

    Raises:
        LayoutError: names the parameter that cannot be synchronised, or the ambiguous name.
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[tuple[object, ...]] = set()
    for raw, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = normalize_name(raw)
        _check_supported(raw, parameter, sharded)
        if parameter.numel() == 0:
            continue
        identity = _storage_identity(parameter)
        if identity in seen:
            continue
        if name in found:
            raise LayoutError(
                f"two trainable parameters have the name {name!r} once wrapper prefixes are "
                f"removed (the second is {raw!r})"
            )
        seen.add(identity)
        found[name] = parameter
    return found


def _check_supported(name: str, parameter: nn.Parameter, sharded: bool) -> None:
    if isinstance(parameter, DTensor) and not sharded:
        raise LayoutError(
            f"parameter {name!r} is sharded; give the Learner the process group of all its ranks"
        )
    if isinstance(parameter, nn.UninitializedParameter):
        raise LayoutError(f"parameter {name!r} is lazy; run one batch before joining")
    if parameter.is_meta:
        raise LayoutError(f"parameter {name!r} is on the meta device and holds no values")
    if parameter.layout is not torch.strided:
        raise LayoutError(f"parameter {name!r} is {parameter.layout}, only strided can be synced")
    if parameter.dtype not in _FLOATS:
        raise LayoutError(
            f"parameter {name!r} is {parameter.dtype}; trainables must be f32, bf16, f16 or f64"
        )


def _storage_identity(parameter: nn.Parameter) -> tuple[object, ...]:
    local = local_part(parameter.detach())
    return (
        local.device,
        local.untyped_storage().data_ptr(),
        local.storage_offset(),
        tuple(parameter.shape),
        parameter.stride(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this rank: the shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in its fragment: elements start..start + numel of the flat vector."""

    name: str
    parameter: nn.Parameter
    start: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """The tensor's part of a flat fragment, in the parameter's shape."""
        return flat[self.start : self.start + self.numel].view(self.parameter.shape)

    def shard_of(self, flat: Tensor) -> Tensor:
        """This rank's part of it: all of it, unless the parameter is sharded."""
        whole = self.of(flat)
        if not isinstance(self.parameter, DTensor):
            return whole
        mesh, places = self.parameter.device_mesh, self.parameter.placements
        # No communication: every rank holds the whole and keeps its own shard.
        moved = whole.to(self.parameter.device)
        return distribute_tensor(moved, mesh, places, src_data_rank=None).to_local()


def specs_of(trainables: dict[str, nn.Parameter]) -> tuple[TensorSpec, ...]:
    """Names and full shapes, as the partition wants them."""
    return tuple(TensorSpec(name, tuple(value.shape)) for name, value in trainables.items())


class Parameters:
    """The trainables of a model in the order of a layout.

    Attributes:
        layout: whose fragments `fragment` arguments index.
        numels: elements of each fragment.
        staged: values on their way from and to the model pass through pinned memory.
        sharded: some parameter is a DTensor: a read needs all ranks.
    """

    def __init__(
        self,
        trainables: dict[str, nn.Parameter],
        layout: NamedLayout,
        host: Host | None = None,
        take: Callable[[int], Tensor] = pageable,
        masters: Masters = no_masters,
    ) -> None:
        """
        Args:
            trainables: of `find_trainables`.
            layout: names every trainable once.
            host: how copies work; by default what suits the parameters' device.
            take: makes room for so many f32 values in ordinary host memory.
            masters: finds the f32 master of a bf16 or f16 parameter.
        """
        self.layout = layout
        self._slots: list[tuple[Slot, ...]] = []
        for fragment in layout.fragments:
            start = 0
            slots: list[Slot] = []
            for spec in fragment.tensors:
                slots.append(Slot(spec.name, trainables[spec.name], start, spec.numel))
                start += spec.numel
            self._slots.append(tuple(slots))
        self.numels = tuple(fragment.numel for fragment in layout.fragments)
        self.sharded = any(isinstance(value, DTensor) for value in trainables.values())
        if host is None:
            host = CUDA if any(value.is_cuda for value in trainables.values()) else CPU
        self._host = host
        self.staged = host.staged
        self._masters = masters
        self._allocate = host.allocate or take

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, fragment: int) -> tuple[Slot, ...]:
        """The fragment's tensors, in layout order."""
        return self._slots[fragment]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All trainables in layout order."""
        for slots in self._slots:
            for slot in slots:
                yield slot.name, slot.parameter

    @torch.no_grad()
    def snapshot(self, fragment: int) -> Tensor:
        """The fragment's values as a flat f32 CPU vector, in one copy (L4)."""
        flat = self.room(fragment)
        for slot in self._slots[fragment]:
            self._fetch(slot, slot.of(flat))
        self._host.synchronize()
        return flat

    @torch.no_grad()
    def delta(self, fragment: int, anchor: Tensor) -> Tensor:
        """f32(local) - anchor, one f32 subtraction per element (L22), in memory of its own."""
        flat = self.room(fragment)
        fetched: list[Slot] = []
        for slot in self._slots[fragment]:
            source = self._source(slot)
            if _is_plain(source):
                torch.sub(source, slot.of(anchor), out=slot.of(flat))
            else:
                self._fetch(slot, slot.of(flat))
                fetched.append(slot)
        self._host.synchronize()
        for slot in fetched:
            slot.of(flat).sub_(slot.of(anchor))
        return flat

    def delta_terms(self, fragment: int, anchor: Tensor) -> Iterator[tuple[Tensor, Tensor]] | None:
        """What `delta` subtracts from each other, in order; each pair is good until the next.

        None: some parameter is not in host memory as one run of values.
        """
        slots = self._slots[fragment]
        sources = [self._source(slot).detach() for slot in slots]
        if not all(_is_run(source) for source in sources):
            return None
        bases = [anchor[slot.start : slot.start + slot.numel] for slot in slots]
        return _terms(zip([source.view(-1) for source in sources], bases, strict=True))

    @torch.no_grad()
    def blend(self, fragment: int, values: Tensor, alpha: float) -> None:
        """θ ← f32(α)·θ + f32(1-α)·Θ in place, then the cast to θ's dtype (L26, L4).

        Args:
            fragment: which one.
            values: Θ, flat f32 CPU vector; only read.
            alpha: local share, 0 <= alpha < 1; 0 overwrites without reading θ.
        """
        if alpha == 0:
            self.overwrite(fragment, values)
            return
        shares = np.float32(alpha), np.float32(1 - alpha)
        with self._staged(values) as staged:
            for slot in self._slots[fragment]:
                source = self._source(slot)
                _blend(local_part(source.detach()), slot.shard_of(staged), *shares)
                increment_version(source)
                _write_through(source, slot.parameter)

    @torch.no_grad()
    def overwrite(self, fragment: int, values: Tensor) -> None:
        """θ ← Θ, cast to each parameter's dtype, in place (L31, L4)."""
        with self._staged(values) as staged:
            for slot in self._slots[fragment]:
                source = self._source(slot)
                local = local_part(source)
                local.copy_(slot.shard_of(staged), non_blocking=self._host.staged)
                _write_through(source, slot.parameter)

    def apply_cut(self, values: list[Tensor]) -> None:
        """Overwrite every fragment with the final cut (L31)."""
        for fragment, final in enumerate(values):
            self.overwrite(fragment, final)

    @torch.no_grad()
    def take_part(self, fragment: int) -> None:
        """Sharded parameters: this rank's share of the leader's `snapshot` or `delta`."""
        for slot in self._slots[fragment]:
            source = self._source(slot)
            if isinstance(source, DTensor):
                source.full_tensor()

    def warm_up(self) -> None:
        """Load the compiled loop, so that the first broadcast does not wait for it."""
        one = np.ones(1, np.float32)
        _blend_in_place(one, one, np.float32(0), np.float32(1))

    def first_bad(self, fragment: int, flat: Tensor, limit: float = np.inf) -> str | None:
        """Name of the first tensor of `flat` that holds a NaN or a magnitude >= limit (L27)."""
        for slot in self._slots[fragment]:
            if not bool((slot.of(flat).abs() < limit).all()):
                return slot.name
        return None

    def room(self, fragment: int) -> Tensor:
        """A flat f32 CPU vector for the fragment, with arbitrary content."""
        return self._allocate(self.numels[fragment])

    def _source(self, slot: Slot) -> Tensor:
        return source_of(slot.name, slot.parameter, self._masters)

    def _fetch(self, slot: Slot, part: Tensor) -> None:
        """Copy to the host; on a GPU the cast happens there and the copy runs on (pinned)."""
        source = self._source(slot)
        if isinstance(source, DTensor):
            source = source.full_tensor()
        if source.is_cuda:
            source = source.float()
        part.copy_(source, non_blocking=self._host.staged)

    @contextmanager
    def _staged(self, values: Tensor) -> Iterator[Tensor]:
        """The values where the parameters can be written from: pinned, for a GPU."""
        if not self._host.staged:
            yield values
            return
        yield self._allocate(values.numel()).copy_(values)
        self._host.synchronize()


def _is_plain(tensor: Tensor) -> bool:
    """f32 in this process's host memory."""
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and not isinstance(tensor, DTensor)
    )


def _terms(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    room = torch.empty(0)
    for values, base in pairs:
        if values.dtype is torch.float32:
            yield values, base
            continue
        room = room if len(room) else torch.empty(PIECE, dtype=torch.float32)
        for begin in range(0, len(values), PIECE):
            part = values[begin : begin + PIECE]
            yield room[: len(part)].copy_(part), base[begin : begin + PIECE]


def _is_run(tensor: Tensor) -> bool:
    """In this process's host memory, without gaps, in row-major order."""
    return (
        tensor.device.type == "cpu" and not isinstance(tensor, DTensor) and tensor.is_contiguous()
    )


def _write_through(source: Tensor, parameter: nn.Parameter) -> None:
    """A parameter with a master is the master's values, rounded."""
    if source is not parameter:
        local_part(parameter).copy_(local_part(source))


def _blend(local: Tensor, incoming: Tensor, left: np.float32, right: np.float32) -> None:
    """The blend of L26 in the memory of `local`."""
    if local.numel() == 0:
        return  # a shard may be empty
    if not local.is_contiguous():
        _blend_slice(local, incoming, left, right)
        return
    flat, values = local.view(-1), incoming.reshape(-1)
    if _is_plain(local):
        _blend_in_place(flat.numpy(), values.numpy(), left, right)
        return
    # In slices, or the temporaries would be as large as the parameter.
    for begin in range(0, len(flat), _SLICE):
        part = slice(begin, begin + _SLICE)
        _blend_slice(flat[part], values[part], left, right)


def _blend_slice(local: Tensor, incoming: Tensor, left: np.float32, right: np.float32) -> None:
    # Two rounded products and one rounded sum: add_(…, alpha=…) would fuse a product and the sum.
    target = incoming.to(local.device, non_blocking=True) * float(right)
    if local.dtype is torch.float32:
        local.mul_(float(left)).add_(target)
    else:
        local.copy_(local.float().mul_(float(left)).add_(target))
