"""Trains under DDP on two ranks, once as it should be and once past the wrapper from a step on."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from ranks import Json
from small import rule_file, sgd
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

STEPS, BYPASSED = 30, 7
RULES = rule_file({"id": "norms", "action": "norm-log", "params": "*"})


def trained(path: str, bypassed: int) -> list[dict[str, float]]:
    """Train, from a step on by a forward that DDP does not know of; return the norms of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model, 0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    norms = []
    with gradsurgeon.apply(wrapped, RULES, optimizer=optimizer, record=path):
        for step in range(STEPS):
            inputs = torch.randn(16, 8, generator=data)
            found = wrapped.module(inputs) if step >= bypassed else wrapped(inputs)
            optimizer.zero_grad()
            functional.mse_loss(found, inputs[:, :4]).backward()
            norms.append(
                {
                    name: float(param.grad.norm())
                    for name, param in model.named_parameters()
                    if param.grad is not None
                }
            )
            optimizer.step()
    return norms


def find() -> Json:
    healthy, bypassed = sys.argv[2:]
    return {"healthy": trained(healthy, STEPS), "bypassed": trained(bypassed, BYPASSED)}


if __name__ == "__main__":
    work(find)
