"""One rank of a two-rank island, started by torchrun in test_ranks.py.

Arguments: port, `ddp` or `fsdp`, a directory for what each rank ends with, state directory or `-`.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from learner import Learner, LearnerConfig
from learner.errors import LearnerError


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(7, 4))
    model.add_module("body", nn.Linear(4, 5))
    if kind == "fsdp":
        return fully_shard(model)
    return nn.parallel.DistributedDataParallel(model)


def whole(parameter: torch.Tensor) -> list[float]:
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()


def main() -> None:
    port, kind, out, state = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = build(kind)
    config = LearnerConfig(
        connect=f"127.0.0.1:{port}",
        learner_id=0,
        fragments=2,
        wire_dtype="f32",
        streams=1,
        alpha=0.5,
        sync_every=2,
        state_dir=None if state == "-" else state,
        state_every_steps=2,
    )
    report: dict[str, object] = {"rank": rank}
    events: list[str] = []
    learner = Learner(
        model,
        config,
        process_group=dist.group.WORLD,
        on_event=lambda event: events.append(type(event).__name__),
    )
    try:
        with learner as sync:
            report["start"] = sync.local_step
            for _ in range(100):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.125)
                info = sync.step(tokens=8, reduce=True)
                if info.stop:
                    break
            report["units"] = sync.units
            report["result"] = None if sync.result is None else list(sync.result.versions)
    except LearnerError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report["events"] = events
    report["steps"] = learner.local_step
    report["values"] = [whole(p) for p in model.parameters()]
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(report))
    dist.barrier()  # gloo aborts a rank whose peer leaves in the middle of its own end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
