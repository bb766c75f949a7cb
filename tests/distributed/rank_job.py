"""What trainings on several ranks share: a small model, passes, averages by hand, and the rules that watch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import Json
from small import tanh_net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gradsurgeon

# As `gradsurgeon run` has them by default.
RULES = "gradsurgeon:debug@1"
STEPS = 24


class Job:
    """One training on this rank."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        # The pair of ranks that this one belongs to.
        self.pair = self.rank // 2
        # The models live as long as their sessions.
        self.watched: list[tuple[nn.Module, gradsurgeon.Session]] = []

    def watch(self, model: nn.Module, *optimizers: Optimizer, seed: int | None = None) -> None:
        """Put the rules on; from here on each rank draws numbers of its own, or those of a seed."""
        session = gradsurgeon.apply(model, RULES, optimizer=optimizers)
        self.watched.append((model, session))
        torch.manual_seed(self.rank if seed is None else seed)

    def sgd(self, model: nn.Module, lr: float = 0.1, seed: int | None = None) -> SGD:
        """Return an optimizer for a model that is watched from now on."""
        optimizer = SGD(model.parameters(), lr)
        self.watch(model, optimizer, seed=seed)
        return optimizer

    def bare(self) -> tuple[nn.Sequential, SGD]:
        """Return a model that is watched, and its optimizer."""
        model = net()
        return model, self.sgd(model)

    def wrapped(self, seed: int | None = None) -> tuple[DistributedDataParallel, SGD]:
        """Return a model under DDP that is watched, and its optimizer."""
        model = DistributedDataParallel(net())
        return model, self.sgd(model, seed=seed)

    def pairs(self) -> Any:
        """Return the group of the pair of this rank."""
        return [dist.new_group([0, 1]), dist.new_group([2, 3])][self.pair]

    def across(self) -> Any:
        """Return the group of this rank and its like in the other pair."""
        return [dist.new_group([0, 2]), dist.new_group([1, 3])][self.rank % 2]

    def found(self) -> list[Json]:
        """End the training; return what the checks told."""
        events = []
        for rank in range(self.world):
            # The first rank, which compares, ends before the others do.
            dist.barrier()
            for _, session in self.watched if rank == self.rank else ():
                session.remove()
                events += [event for event in session.events if event.kind in ("check", "fact")]
        return [
            {"kind": one.kind, "step": one.step, "name": one.name, "message": one.message}
            for one in events
        ]


def net(seed: int = 0, width: int = 32, out: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return tanh_net(16, width, out)


def experts(job: Job) -> tuple[nn.Sequential, DistributedDataParallel]:
    """Return a model whose last layer two ranks share and whose rest all share, and its wrapper."""
    group = job.across()
    torch.manual_seed(job.rank % 2)
    expert = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model = nn.Sequential(net(), expert)
    ignored = [f"1.module.{name}" for name, _ in expert.module.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model, DistributedDataParallel(model)


def data() -> Tensor:
    return torch.randn(8, 16)


def loss_of(called: Callable[[Tensor], Tensor]) -> Tensor:
    return called(data()).square().mean()


def passes(
    called: Callable[[Tensor], Tensor], *optimizers: Optimizer, steps: int = STEPS
) -> Iterator[int]:
    """Run one backward pass per step on cleared gradients; the caller makes the update."""
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(called).backward()
        yield step


def fit(called: Callable[[Tensor], Tensor], *optimizers: Optimizer, steps: int = STEPS) -> None:
    for _ in passes(called, *optimizers, steps=steps):
        for optimizer in optimizers:
            optimizer.step()


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average the gradients of a model by hand."""
    for grad in [param.grad for param in model.parameters() if param.grad is not None]:
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))


@torch.no_grad()
def average_weights(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for param in model.parameters():
        dist.all_reduce(param, group=group)
        param.div_(dist.get_world_size(group))
