"""A NaN is born on one rank alone; each rank writes down what it was told of that."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

FAULT, STEPS = 2, 4


class Body(nn.Module):
    """Takes the logarithm of what is negative, on rank 1 in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.spoilt = False

    def forward(self, x: Tensor) -> Tensor:
        return x.log() if self.spoilt else x.tanh()


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.body = nn.Linear(4, 4), norm, Body()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(self.norm(self.first(x))))
        return out


class Gathered(nn.Module):
    """Talks to the other ranks in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def train(kind: str, then: str) -> dict[str, Any]:
    model = Net(Gathered() if kind == "gathered" else nn.Identity())
    called: Any = model
    if kind == "FSDP2":
        fully_shard(model)
    else:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": then}
    told, error = [], None
    with gradsurgeon.apply(called, {"version": 1, "rules": [rule]}, optimizer=optimizer) as session:
        for step in range(STEPS):
            model.body.spoilt = step == FAULT and dist.get_rank() == 1
            optimizer.zero_grad()
            given = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            called(given.chunk(2)[dist.get_rank()]).square().mean().backward()
            try:
                optimizer.step()
            except gradsurgeon.NonFiniteGradientError as caught:
                error = str(caught)
                break
        told = [event.message for event in session.events if event.kind == "trap"]
    return {"told": told, "error": error, "step": step}


def main() -> dict[str, Any]:
    return {
        f"{kind} {then}": train(kind, then)
        for kind in ("DDP", "FSDP2", "gathered")
        for then in ("raise", "skip-step")
    }


if __name__ == "__main__":
    work(main)
