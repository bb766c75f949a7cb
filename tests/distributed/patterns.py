"""Training loops of scripts whose ranks do not all do the same between two backward passes that they share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gradsurgeon

STEPS = 5
# The pass, from 1, in which rank 1 objects, and the step in which it goes its own way.
TRIP = ODD = 3
# Rank 1 is late by that, in seconds.
LATE = 0.6
Pattern = Callable[["Case"], object]
P = TypeVar("P", bound=Callable[..., object])
ALIKE: dict[str, Pattern] = {}
FSDP2: dict[str, Pattern] = {}
DEADLY: dict[str, Pattern] = {}


class Net(nn.Module):
    """Two layers, and a parameter that DDP leaves to each rank."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Tanh()
        self.last = nn.Linear(6, 4)
        self.part = nn.ParameterDict({"own": torch.ones(4)})
        self.side = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, side: bool = True) -> Tensor:
        """Return what the model makes of ``x``."""
        out: Tensor = self.last(self.norm(self.first(x))) * self.part["own"]
        return out + self.side(x) if side else out


class Case:
    """One training, and what it has come to.

    Args:
        how: ``plain`` without rules, ``quiet`` with a trap that never trips, ``trips`` with one that does, ``records``
            with rules that only record.
    """

    def __init__(self, how: str) -> None:
        self.how, self.rank, self.world = how, dist.get_rank(), dist.get_world_size()
        self.passes = 0
        # Of each update of the first optimizer: the passes before it, and whether it moved a weight.
        self.updates: list[tuple[int, bool]] = []
        self.session: gradsurgeon.Session | None = None
        self.searches = False
        self.kept = lambda: None
        # Of a sharded model without rules: after each pass, the norm of the whole gradient of one parameter.
        self.norms: list[float] = []

    def make(self, *, norm: bool = False, **options: Any) -> Case:
        """Make a model under DDP, and an optimizer."""
        self.net: Any = Net(norm=norm)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.net, ["part.own"])
        self.called: Any = DistributedDataParallel(self.net, **options)
        return self.apply()

    def divide(self, *shape: int) -> Case:
        """Make a model that is sharded over ranks, and an optimizer."""
        self.net = Net()
        names = ("replicate", "shard")[-len(shape or (1,)) :]
        mesh = init_device_mesh("cpu", shape or (self.world,), mesh_dim_names=names)
        for part in (self.net.first, self.net.last, self.net):
            fully_shard(part, mesh=mesh)
        self.called = self.net
        return self.apply()

    def parallel(self) -> Case:
        """Make a model whose layers are divided over ranks."""
        self.net = Net()
        mesh = init_device_mesh("cpu", (self.world,))
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        self.called = parallelize_module(self.net, mesh, plan)
        return self.apply()

    def apply(self) -> Case:
        """Put a trap on, if there is to be one, and let it trip once."""
        params = list(self.net.parameters())
        self.optimizer = torch.optim.SGD(params, lr=0.05)
        sharded = isinstance(self.net.last.weight, DTensor)
        faulty = self.net.last.weight if sharded else self.net.part["own"]

        def spoil(param: Any) -> None:
            if (self.how, self.passes, self.rank) == ("trips", TRIP - 1, 1):
                (param.grad.to_local() if sharded else param.grad).fill_(float("nan"))

        faulty.register_post_accumulate_grad_hook(spoil)
        torch.manual_seed(10 + self.rank)
        if self.how != "plain":
            rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
            given = [{**rule, "forensics": False}]
            if self.how == "records":
                given = [
                    {
                        "id": at,
                        "action": "norm-log",
                        "params": "*",
                        "at": at,
                        "stats": ["l2", "std"],
                    }
                    for at in ("accumulated", "step")
                ]
            rules = {"version": 1, "rules": given}
            # To look for optimizers among all live objects takes as long as the training.
            known = None if self.searches else self.optimizer
            self.session = gradsurgeon.apply(self.net, rules, optimizer=known)
        return self

    def backward(self, model: Any = None, **options: Any) -> Tensor:
        """Run a pass that all ranks share, or one of another model."""
        # Tensor parallel ranks have one batch between them.
        x = torch.ones(3, 4) * (1.0 + self.passes) if hasattr(self, "same") else torch.randn(3, 4)
        loss: Tensor = (model or self.called)(x, **options).square().mean()
        loss.backward()
        self.passes += 1
        grad = self.net.last.weight.grad
        if self.how == "plain" and isinstance(grad, DTensor):
            self.norms.append(float(grad.full_tensor().norm()))
        return loss

    def update(self, optimizer: Any = None) -> None:
        """Make an update of the first optimizer, or of another one."""
        if optimizer is not None:
            optimizer.step()
            return
        before = self.weights()
        self.optimizer.step()
        self.updates.append((self.passes, self.weights() != before))
        self.kept()

    def weights(self) -> list[list[float]]:
        """Return what this rank has of all weights."""
        params = (p.to_local() if isinstance(p, DTensor) else p for p in self.net.parameters())
        return [[float(one) for one in param.detach().flatten()] for param in params]

    def loop(
        self,
        between: Callable[[int], Any] = lambda _: None,
        after: Callable[[int], Any] = lambda _: None,
        steps: int = STEPS,
    ) -> None:
        """Train; an update is left out where ``between`` returns false, and not ``None``."""
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            self.backward()
            if between(step) is not False:
                self.update()
            after(step)

    def odd(self, step: int) -> bool:
        """Tell whether this rank goes its own way now."""
        return self.rank == 1 and step == ODD


def alike(pattern: P) -> P:
    """Note a pattern that all ranks come out of."""
    ALIKE[pattern.__name__] = pattern
    return pattern


def divided(pattern: P) -> P:
    """Note one of a sharded model."""
    FSDP2[pattern.__name__] = pattern
    return pattern


def deadly(pattern: P) -> P:
    """Note one that ends a process before the others."""
    DEADLY[pattern.__name__] = pattern
    return pattern


@alike
def normal(case: Case) -> None:
    case.make().loop()


@alike
def bucket_view(case: Case) -> None:
    case.make(gradient_as_bucket_view=True).loop()


@alike
def static_graph(case: Case) -> None:
    case.make(static_graph=True).loop()


@alike
def unused_parameters(case: Case) -> None:
    case.make(find_unused_parameters=True)
    for step in range(STEPS):
        case.optimizer.zero_grad()
        case.backward(side=(step + case.rank) % 2 == 0)
        case.update()


@alike
def no_sync(case: Case, more: int = 0) -> None:
    case.make()
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        for number in range(2 + more * case.rank):
            last = number == 1 + more * case.rank
            with nullcontext() if last else case.called.no_sync():
                case.backward()
            case.passes -= not last
        case.update()


@alike
def no_sync_uneven(case: Case) -> None:
    no_sync(case, more=2)


@alike
def gan(case: Case) -> None:
    case.searches = True
    case.make()
    generator = DistributedDataParallel(nn.Linear(4, 4))
    other = torch.optim.Adam(generator.parameters(), lr=1e-3)
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        case.backward(lambda x: case.called(generator(x).detach()))
        case.update()
        other.zero_grad()
        # Its gradients for the first model are left there, as they are in many scripts.
        case.called(generator(torch.randn(3, 4))).mean().backward()
        case.update(other)


@alike
def two_optimizers(case: Case, on: tuple[int, ...] = (0, 1, 2)) -> None:
    case.searches = True
    case.make()
    other = torch.optim.AdamW([case.net.side.bias], lr=1e-3)
    case.optimizer = torch.optim.SGD(
        [p for p in case.net.parameters() if p is not case.net.side.bias], 0.05
    )
    case.loop(after=lambda _: case.update(other) if case.rank in on else None)


@alike
def second_optimizer_on_rank_0(case: Case) -> None:
    two_optimizers(case, on=(0,))


@alike
def update_without_backward(case: Case) -> None:
    case.make()
    if case.rank == 1:
        case.update()
    case.loop(after=lambda _: case.update() if case.rank == 1 else None)


@alike
def own_skip(case: Case, after: Callable[[int], Any] = lambda _: None, **options: Any) -> None:
    case.make(**options).loop(lambda step: not case.odd(step), after)


@alike
def own_skip_batch_norm(case: Case) -> None:
    own_skip(case, norm=True)


@alike
def last_update_left_out(case: Case) -> None:
    case.make().loop(lambda step: not (case.rank == 1 and step == STEPS))


@alike
def subgroup_of_one_rank(case: Case) -> None:
    case.make()
    if case.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    case.loop()


@alike
def slow_save(case: Case) -> None:
    case.make().loop(lambda step: time.sleep(LATE) if case.rank == 0 and step == ODD else None)


@alike
def slow_update(case: Case) -> None:
    case.make().loop(lambda step: time.sleep(LATE) if case.odd(step) else None)


@alike
def two_reducing_passes(case: Case) -> None:
    case.make()
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        case.backward()
        case.backward()
        case.update()


@alike
def own_pass_of_the_inner_model(case: Case) -> None:
    def between(step: int) -> None:
        if case.odd(step):
            # As for a saliency map: DDP does not average it.
            torch.autograd.grad(case.net(torch.randn(3, 4)).sum(), case.net.first.weight)

    case.make().loop(between)


@alike
def own_pass_of_another_model(case: Case) -> None:
    def after(step: int) -> None:
        if case.odd(step):
            case.called(torch.randn(3, 4))
            nn.Linear(3, 1)(torch.randn(2, 3)).sum().backward()

    case.make().loop(after=after)


@divided
def fsdp2(case: Case) -> None:
    case.divide().loop()


@divided
def fsdp2_own_skip(case: Case) -> None:
    case.divide().loop(lambda step: not case.odd(step))


@divided
def fsdp2_last_update_left_out(case: Case) -> None:
    case.divide().loop(lambda step: not (case.rank == 1 and step == STEPS))


@divided
def tensor_parallel(case: Case) -> None:
    case.same = True  # type: ignore[attr-defined]
    case.parallel().loop()


@divided
def tensor_parallel_own_skip(case: Case) -> None:
    case.same = True  # type: ignore[attr-defined]
    case.parallel().loop(lambda step: not case.odd(step))


def hsdp(case: Case) -> None:
    case.divide(2, 2).loop()


def hsdp_own_skip(case: Case) -> None:
    case.divide(2, 2).loop(lambda step: not case.odd(step))


@deadly
def leaves_after_own_skip(case: Case) -> None:
    case.make().loop(lambda step: not (case.rank == 1 and step == STEPS - 1), steps=STEPS - 1)


@deadly
def leaves_early(case: Case) -> None:
    case.make().loop(steps=3 if case.rank == 1 else STEPS)


@deadly
def reads_late(case: Case) -> None:
    late = case.rank == 1
    case.make().loop(lambda step: time.sleep(1.5) if late and step == STEPS else None)


@deadly
def killed(case: Case) -> None:
    case.make().loop(lambda step: os.kill(os.getpid(), signal.SIGKILL) if case.odd(step) else None)


@deadly
def exception_at_the_end(case: Case) -> None:
    def between(step: int) -> None:
        if case.rank == 1 and step == STEPS:
            raise ValueError("not caught")

    case.make().loop(between)
