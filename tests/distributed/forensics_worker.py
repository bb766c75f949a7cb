"""A NaN is born on one rank alone; each rank writes down what it was told of that."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Json
from small import attach, messages, sgd
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

FAULT, STEPS, MICRO_BATCHES = 2, 4, 3
# How large the numbers of a faulty batch are.
FAULTY_SIZE = 1000


class Body(nn.Module):
    """Takes the logarithm of what is negative, on rank 1 in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.faulty = False

    def forward(self, x: Tensor) -> Tensor:
        return x.log() if self.faulty and x.abs().max() > FAULTY_SIZE / 10 else x.tanh()


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.body = nn.Linear(4, 4), norm, Body()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(self.norm(self.first(x))))


class Gathered(nn.Module):
    """Talks to the other ranks in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def whole() -> Net:
    return Net(nn.Linear(4, 4))


MODELS = {"gathered": lambda: Net(Gathered()), "FSDP2 whole": whole}


def train(
    kind: str,
    then: str,
    micro_batches: int = 1,
    *,
    pauses: int | None = None,
    folder: Path | None = None,
    given_nan: bool = False,
    **options: Any,
) -> Json:
    torch.manual_seed(0)
    model = MODELS.get(kind, lambda: Net(nn.Identity()))()
    called: Any = model
    if kind.startswith("FSDP2"):
        fully_shard(model)
    else:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": then, **options}
    told, error = [], None
    torch.manual_seed(1)
    with attach(
        called,
        rule,
        optimizer=optimizer,
        record=None if folder is None else folder / str(dist.get_rank()),
    ) as session:
        if dist.get_rank() == pauses:
            session.pause()
        for step in range(STEPS):
            optimizer.zero_grad()
            model.body.faulty = step == FAULT and dist.get_rank() == 1
            for number in range(micro_batches):
                last = number == micro_batches - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last or kind != "FSDP2 whole")
                given = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                if model.body.faulty and number == micro_batches // 2:
                    given *= math.nan if given_nan else FAULTY_SIZE
                gradsurgeon.tag(torch.arange(8).chunk(2)[dist.get_rank()], "sample_ids")
                called(given.chunk(2)[dist.get_rank()]).square().mean().backward()
            if kind == "FSDP2 evaluated":
                with torch.no_grad():
                    called(torch.ones(2, 4))
            try:
                optimizer.step()
            except gradsurgeon.NonFiniteGradientError as caught:
                error = str(caught)
                break
        told = messages(session, "trap")
        notices = messages(session, "notice")
    state = {name: _whole(tensor).tolist() for name, tensor in model.state_dict().items()}
    return {
        "told": told,
        "error": error,
        "step": step,
        "state": state,
        "notices": notices,
    }


def scaled() -> list[str]:
    """Train under a scaler, with NaN in the batch of rank 1 in one step; return the notices."""
    model = Net(nn.Identity())
    called = DistributedDataParallel(model)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": "warn"}
    with attach(called, rule, optimizer=optimizer) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            given = torch.ones(4, 4)
            if step == FAULT and dist.get_rank() == 1:
                given[:, 0] = float("nan")
            scaler.scale(called(given).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return messages(session, "notice")


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def main() -> Json:
    kinds = ("DDP", "FSDP2", "gathered")
    seen = {
        f"{kind} {then}": train(kind, then) for kind in kinds for then in ("raise", "skip-step")
    }
    seen["scaled"] = {"notices": scaled()}
    seen["FSDP2 bare"] = train("FSDP2", "skip-step", forensics=False)
    seen["FSDP2 warn"] = train("FSDP2", "warn")
    seen["FSDP2 given NaN"] = train("FSDP2", "raise", given_nan=True)
    seen["FSDP2 paused"] = train("FSDP2", "raise", pauses=0)
    seen["FSDP2 evaluated"] = train("FSDP2 evaluated", "raise")
    seen["FSDP2 whole"] = train("FSDP2 whole", "skip-step", MICRO_BATCHES)
    seen["FSDP2 recorded"] = train("FSDP2", "raise", folder=Path(sys.argv[1]).parent)
    return seen


if __name__ == "__main__":
    work(main)
