"""Islands of several ranks: rank 0 talks to the syncer and tells the others what to do (section 7).

Every collective is announced: a follower waits for a header (four numbers) in its `step`, does the
operation it names, and waits for the next one until the boundary is over. So no rank enters a
collective that another does not, and no rank but the leader waits for a network event (L61, L62).

| operation | numbers         | what follows                                              |
|-----------|-----------------|-----------------------------------------------------------|
| BLEND     | fragment        | the flat f32 values, blended by every rank (L26)          |
| OVERWRITE | fragment        | the flat f32 values of the final cut (L31)                |
| GATHER    | fragment        | sharded parameters only: every rank takes part            |
| CONFIRM   |                 | minimum over the ranks: each fragment was overwritten     |
| SAVE      | wait            | every rank saves its durable state (L53)                  |
| DONE      | stop, step      | the boundary is over; with stop, the versions of the cut  |
| FATAL     | length          | class and text of the error, raised by every rank         |
"""

from __future__ import annotations

from enum import IntEnum, auto

import torch
import torch.distributed as dist
from torch import Tensor

_HEADER = 4


class Operation(IntEnum):
    """What a header announces."""

    BLEND = auto()
    OVERWRITE = auto()
    GATHER = auto()
    CONFIRM = auto()
    SAVE = auto()
    DONE = auto()
    FATAL = auto()


class Ranks:
    """The process group of one island. Its timeout must exceed the finalization wait (L62).

    Attributes:
        leading: this is the rank that talks to the syncer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """
        Args:
            group: all ranks of the island, in any backend.
        """
        self._group = group
        self._leader = dist.get_global_rank(group, 0)
        self._size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.leading = self.rank == 0
        on_gpu = dist.get_backend(group) == dist.Backend.NCCL
        self._device = torch.device("cuda" if on_gpu else "cpu")

    def announce(self, operation: Operation, *numbers: int) -> None:
        """Leader: the next operation."""
        header = [operation, *numbers, *([0] * _HEADER)][:_HEADER]
        self._broadcast(torch.tensor(header, dtype=torch.int64))

    def listen(self) -> tuple[Operation, int, int]:
        """Follower: wait for the next operation and its numbers."""
        header = self._broadcast(torch.zeros(_HEADER, dtype=torch.int64)).tolist()
        return Operation(header[0]), header[1], header[2]

    def values(self, values: Tensor) -> None:
        """Hand a CPU tensor from the leader to everybody, in place."""
        moved = self._broadcast(values)
        if moved is not values and not self.leading:
            values.copy_(moved)

    def text(self, text: str | None, length: int) -> str:
        """Hand a text of `length` UTF-8 bytes from the leader (who gives it) to everybody."""
        raw = torch.zeros(length, dtype=torch.uint8)
        if text is not None:
            raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return bytes(self._broadcast(raw).cpu().numpy()).decode()

    def least(self, number: int) -> int:
        """Minimum over all ranks."""
        return self._reduce(int(number), dist.ReduceOp.MIN)

    def total(self, number: int) -> int:
        """Sum over all ranks."""
        return self._reduce(number, dist.ReduceOp.SUM)

    def same(self, data: bytes) -> bool:
        """Whether every rank gives the leader's bytes (of equal length)."""
        ours = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = self._broadcast(ours.clone()).cpu()
        return self.least(torch.equal(ours, theirs)) == 1

    def common(self, numbers: list[int], room: int) -> list[int]:
        """The non-negative numbers, at most `room` a rank, that every rank has; ascending."""
        ours = [*numbers, *([-1] * room)][:room]
        mine = torch.tensor(ours, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(gathered, mine, group=self._group)
        shared = set.intersection(*(set(entry.tolist()) for entry in gathered))
        return sorted(number for number in shared if number >= 0)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        # The copy on a GPU is new; on the CPU a follower's tensor receives in place.
        moved = tensor.to(self._device)
        dist.broadcast(moved, self._leader, group=self._group)
        return moved

    def _reduce(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        value = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(value, operation, group=self._group)
        return int(value)
