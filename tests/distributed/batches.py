"""Small models whose parts two ranks share unevenly, and what they are given."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small import tanh_net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def data(step: int) -> Tensor:
    """Return the whole batch of a step, the same on every rank."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def mine(step: int) -> Tensor:
    """Return this rank's half of a batch."""
    return data(step).chunk(2)[dist.get_rank()]


def make() -> nn.Sequential:
    """Return a model whose rows two ranks share unevenly; one of them gets none of `2`."""
    torch.manual_seed(0)
    return tanh_net(4, 5, 1)


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    """Shard a model, layer by layer."""
    for part in (model[0], model[2], model):
        fully_shard(part, **options)
    return model


def wrapped(kind: str, model: nn.Sequential) -> Any:
    """Return what a script calls: the model itself, which FSDP2 shards, or its wrapper."""
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP2":
        return shard(model)
    return model


class Block(nn.Module):
    """What tensor parallelism divides: two projections after a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        """Shape ``[batch, sequence, 4]`` to the same."""
        return self.down(torch.tanh(self.up(self.norm(x))))


def divide(block: Block) -> nn.Module:
    """Divide a block over two ranks, which have half of each sequence."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(block, init_device_mesh("cpu", (2,)), plan)


def whole(tensor: Any) -> list[float]:
    """Return all elements of a tensor."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [float(value) for value in full.detach().flatten()]
