"""A NaN is born on one rank alone; each rank writes down what it was told of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worker import work

import gradsurgeon

FAULT, STEPS, MICRO_BATCHES = 2, 4, 3
# How large the numbers are of a batch that is spoilt.
SPOILT = 1000


class Body(nn.Module):
    """Takes the logarithm of what is negative, on rank 1 in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.spoilt = False

    def forward(self, x: Tensor) -> Tensor:
        return x.log() if self.spoilt and x.abs().max() > SPOILT / 10 else x.tanh()


class Row(Body):
    """Has an infinite gradient in its first column alone, which is one row of the weight before it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.spoilt:
            return x.tanh()
        first = (x[:, :1] * 0).sqrt()
        return torch.cat([first, x[:, 1:]], 1)


class Net(nn.Module):
    def __init__(self, norm: nn.Module, body: Body | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.body = nn.Linear(4, 4), norm, body or Body()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(self.norm(self.first(x))))
        return out


class Checkpointed(nn.Module):
    """Runs again in the backward pass, with the same random numbers, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class ByMethod(Net):
    """Enters its body by a method of its own."""

    body: Any

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body.enter(self.norm(self.first(x))))
        return out


class Entered(Body):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def enter(self, x: Tensor) -> Tensor:
        return self.forward(x * self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Gathered(nn.Module):
    """Talks to the other ranks in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def halves() -> Net:
    return Net(Checkpointed())


MODELS = {
    "gathered": lambda: Net(Gathered()),
    "FSDP2 halves": halves,
    "FSDP2 row": lambda: Net(nn.Identity(), Row()),
    "FSDP2 method": lambda: ByMethod(nn.Identity(), Entered()),
    "FSDP2 whole": lambda: Net(nn.Linear(4, 4)),
}


def shard(model: Net, kind: str) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    if kind == "FSDP2 halves":
        inner = model.norm.get_submodule("inner")
        fully_shard(inner, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=half)
        return
    if kind == "FSDP2 wrapped":
        wrapped: Any = fully_shard(checkpoint_wrapper(model.first))
        model.first = wrapped
    if kind == "FSDP2 hooked":
        # What it makes would not fit into half precision.
        half = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
        fully_shard(model.first, mp_policy=half)
        model.first.register_forward_hook(lambda module, args, out: out * 1e5 / 1e5)
    if kind == "FSDP2 method":
        fully_shard(model.body)
        register_fsdp_forward_method(model.body, "enter")
    fully_shard(model)


def train(
    kind: str,
    then: str,
    micro_batches: int = 1,
    pauses: int | None = None,
    folder: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = MODELS.get(kind, lambda: Net(nn.Identity()))()
    called: Any = model
    if kind.startswith("FSDP2"):
        shard(model, kind)
    else:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": then, **options}
    told, error = [], None
    torch.manual_seed(1)
    with gradsurgeon.apply(
        called,
        {"version": 1, "rules": [rule]},
        optimizer=optimizer,
        record=None if folder is None else folder / str(dist.get_rank()),
    ) as session:
        if dist.get_rank() == pauses:
            session.pause()
        for step in range(STEPS):
            optimizer.zero_grad()
            model.body.spoilt = step == FAULT and dist.get_rank() == 1
            for number in range(micro_batches):
                last = number == micro_batches - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last or kind != "FSDP2 whole")
                given = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                if model.body.spoilt and number == micro_batches // 2:
                    given *= SPOILT
                called(given.chunk(2)[dist.get_rank()]).square().mean().backward()
            if kind == "FSDP2 evaluated":
                with torch.no_grad():
                    called(torch.ones(2, 4))
            try:
                optimizer.step()
            except gradsurgeon.NonFiniteGradientError as caught:
                error = str(caught)
                break
        told = [event.message for event in session.events if event.kind == "trap"]
        notices = [event.message for event in session.events if event.kind == "notice"]
    state = {name: _whole(tensor).tolist() for name, tensor in model.state_dict().items()}
    return {
        "told": told,
        "error": error,
        "step": step,
        "state": state,
        "notices": notices,
        "divided": all(isinstance(param, DTensor) for param in model.parameters()),
    }


def scaled() -> list[str]:
    """Train under a scaler, with NaN in the batch of rank 1 in one step; return the notices."""
    model = Net(nn.Identity())
    called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": "warn"}
    with gradsurgeon.apply(called, {"version": 1, "rules": [rule]}, optimizer=optimizer) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            given = torch.ones(4, 4)
            if step == FAULT and dist.get_rank() == 1:
                given[:, 0] = float("nan")
            scaler.scale(called(given).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [event.message for event in session.events if event.kind == "notice"]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def main() -> dict[str, Any]:
    kinds = ("DDP", "FSDP2", "FSDP2 halves", "FSDP2 row", "gathered")
    seen = {
        f"{kind} {then}": train(kind, then) for kind in kinds for then in ("raise", "skip-step")
    }
    seen["scaled"] = {"notices": scaled()}
    seen["FSDP2 warn"] = train("FSDP2", "warn")
    seen["FSDP2 accumulated"] = train("FSDP2", "raise", MICRO_BATCHES)
    seen["FSDP2 paused"] = train("FSDP2", "raise", pauses=0)
    for kind in ("FSDP2 wrapped", "FSDP2 hooked", "FSDP2 evaluated"):
        seen[kind] = train(kind, "raise")
    seen["FSDP2 whole"] = train("FSDP2 whole", "skip-step", MICRO_BATCHES)
    seen["FSDP2 method skip-step"] = train("FSDP2 method", "skip-step")
    seen["FSDP2 method bare"] = train("FSDP2 method", "skip-step", forensics=False)
    seen["FSDP2 halves bare"] = train("FSDP2 halves", "skip-step", forensics=False)
    seen["FSDP2 halves bundle"] = train("FSDP2 halves", "raise", folder=Path(sys.argv[1]).parent)
    return seen


if __name__ == "__main__":
    work(main)
