"""Trainings on two ranks under `check-ranks`; each rank writes down what was told of each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from worker import work

import gradsurgeon

RULES = {
    "version": 1,
    "rules": [
        {"id": action, "action": action, "params": "*"}
        for action in ("check-ranks", "check-update", "check-loop", "check-structure")
    ],
}
STEPS = 40
Before = Callable[[int, nn.Module], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def average(_step: int, model: nn.Module) -> None:
    for grad in [param.grad for param in model.parameters() if param.grad is not None]:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()  # noqa: PLW2901 # in place


def nothing(_step: int, _model: nn.Module) -> None:
    return


def trained(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    before: Before = nothing,
    after: Before = nothing,
    optimizer: SGD | None = None,
    *,
    skips: Callable[[int], bool] = lambda _step: False,
) -> list[dict[str, Any]]:
    """Train on batches of this rank; return the events of checks."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.02)
    torch.manual_seed(dist.get_rank())
    with gradsurgeon.apply(model, RULES, optimizer=optimizer) as session:
        for step in range(STEPS):
            inputs = torch.randn(32, 8)
            optimizer.zero_grad()
            (forward(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            before(step, model)
            if not skips(step):
                optimizer.step()
            after(step, model)
        dist.barrier()
    events = [event for event in session.events if event.kind == "check"]
    return [{"step": event.step, "name": event.name, "message": event.message} for event in events]


def healthy() -> list[dict[str, Any]]:
    model = net()
    return trained(model, DistributedDataParallel(model))


def healthy_by_hand() -> list[dict[str, Any]]:
    model = net()
    return trained(model, model, average)


def accumulating() -> list[dict[str, Any]]:
    """Half of the updates follow a pass under `no_sync`, and each rank makes them alone."""
    model = net()
    wrapper, turn = DistributedDataParallel(model), [0]

    def forward(inputs: Tensor) -> Tensor:
        turn[0] += 1
        if turn[0] % 2:
            with wrapper.no_sync():
                out: Tensor = wrapper(inputs)
                return out
        whole: Tensor = wrapper(inputs)
        return whole

    return trained(model, forward)


def sweep() -> list[dict[str, Any]]:
    model = net()
    return trained(model, model)


def bypassed() -> list[dict[str, Any]]:
    model = net()
    wrapper = DistributedDataParallel(model)
    return trained(model, wrapper.module)


def lost() -> list[dict[str, Any]]:
    model = net()

    def before(step: int, model: nn.Module) -> None:
        average(step, model)
        if step == 15 and dist.get_rank() == 1:
            grad = model.get_parameter("0.weight").grad
            assert grad is not None
            grad.zero_()

    return trained(model, model, before)


def unlike_from_the_start() -> list[dict[str, Any]]:
    model = net()
    with torch.no_grad():
        model.get_parameter("3.weight").add_(0.1 * dist.get_rank())
    return trained(model, model, average)


def drifting() -> list[dict[str, Any]]:
    model = net()

    def after(step: int, model: nn.Module) -> None:
        if step == 20 and dist.get_rank() == 1:
            with torch.no_grad():
                model.get_parameter("3.weight").mul_(0.9)

    return trained(model, DistributedDataParallel(model), after=after)


def skipping() -> list[dict[str, Any]]:
    model = net()
    return trained(
        model,
        DistributedDataParallel(model),
        skips=lambda step: step == 20 and dist.get_rank() == 1,
    )


def skipping_together() -> list[dict[str, Any]]:
    model = net()
    return trained(model, DistributedDataParallel(model), skips=lambda step: step % 7 == 3)


def sharded() -> list[dict[str, Any]]:
    """Each rank holds, updates and compares its part of each parameter."""
    model = net()
    fully_shard(model)
    return trained(model, model)


def sharded_at_rest() -> list[dict[str, Any]]:
    """The optimizer has the parts of the last layer alone."""
    model = net()
    fully_shard(model)
    return trained(model, model, optimizer=SGD(model[3].parameters(), lr=0.02))


def own_layer() -> list[dict[str, Any]]:
    """DDP averages the body; each rank has a last layer of its own, as an expert."""
    body = DistributedDataParallel(nn.Linear(8, 16))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(16, 1))
    return trained(model, model)


def parting() -> list[dict[str, Any]]:
    """Ranks average for twenty updates, then train apart, as in local SGD or a sweep."""
    model = net()

    def before(step: int, model: nn.Module) -> None:
        if step < 20:
            average(step, model)

    return trained(model, model, before)


CASES = (
    own_layer,
    parting,
    sharded,
    sharded_at_rest,
    healthy,
    healthy_by_hand,
    accumulating,
    sweep,
    bypassed,
    lost,
    unlike_from_the_start,
    drifting,
    skipping,
    skipping_together,
)


def find() -> dict[str, Any]:
    return {case.__name__: case() for case in CASES}


work(find)
