"""Trainings on several ranks in which one thing is wrong, each with what `check-ranks` is to tell of it first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from distributed.healthy_ranks import Case
from distributed.rank_job import (
    Job,
    average,
    average_weights,
    data,
    experts,
    fit,
    loss_of,
    net,
    passes,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


@dataclass(frozen=True)
class Fault:
    """What is told first: by which rank, of which step and parameter, and parts of the message."""

    case: Case
    step: int
    name: str
    parts: tuple[str, ...]
    rank: int


# By the number of ranks.
FAULTY: dict[int, dict[str, Fault]] = {2: {}, 4: {}}
_GRADIENTS = "differ in the gradients of"
_WEIGHTS = "differ in the weights"
_BYPASSED = "call the wrapper in the forward pass, not `model.module`"
_SKIPPED = "look for a condition around `optimizer.step()`"
_ASSIGNED = "an assignment that only some ranks make"


def faulty(
    step: int, name: str, *parts: str, world: int = 2, rank: int = 0
) -> Callable[[Case], Case]:
    def put(case: Case) -> Case:
        FAULTY[world][case.__name__] = Fault(case, step, name, parts, rank)
        return case

    return put


@faulty(10, "0.weight", _GRADIENTS, _BYPASSED)
def bypassed_later(job: Job) -> None:
    model, optimizer = job.wrapped()
    fit(model, optimizer, steps=10)
    fit(model.module, optimizer)


@faulty(0, "1.0.weight", _GRADIENTS, _BYPASSED)
def one_of_two_wrappers_bypassed(job: Job) -> None:
    first = DistributedDataParallel(net(out=16))
    second = DistributedDataParallel(net(seed=1))
    optimizer = SGD([*first.parameters(), *second.parameters()], 0.1)
    job.watch(nn.Sequential(first, second), optimizer)
    fit(lambda x: second.module(first(x)), optimizer)


@faulty(0, "0.weight", _GRADIENTS, "averages once per call of the wrapper", "Add up the losses")
def two_passes_of_one_forward_pass(job: Job) -> None:
    model, optimizer = job.wrapped()
    for _ in range(12):
        optimizer.zero_grad()
        out = model(data())
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()


@faulty(0, "2.weight", _GRADIENTS, "does not average them", "make the wrapper afterwards")
def layer_replaced_after_the_wrapper(job: Job) -> None:
    model = net()
    wrapper = DistributedDataParallel(model, find_unused_parameters=True)
    model[2] = nn.Linear(32, 4)
    fit(wrapper, job.sgd(model))


@faulty(0, "0.weight", _GRADIENTS, "moved or unfroze them after the wrapper was made")
def unfrozen_after_the_wrapper(job: Job) -> None:
    model = net()
    model[0].requires_grad_(requires_grad=False)
    wrapper = DistributedDataParallel(model)
    model[0].requires_grad_(requires_grad=True)
    fit(wrapper, job.sgd(model))


@faulty(9, "0.weight", _GRADIENTS, "leave `no_sync` before the last pass of each update")
def last_update_of_an_epoch_alone(job: Job) -> None:
    model, optimizer = job.wrapped()
    for step in range(24):
        model.require_backward_grad_sync = step % 10 != 9
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@faulty(3, "0.weight", _GRADIENTS, "run all passes but the last under `no_sync`")
def last_micro_batch_alone(job: Job) -> None:
    model, optimizer = job.wrapped()
    for _ in range(12):
        optimizer.zero_grad()
        loss_of(model).backward()
        with model.no_sync():
            loss_of(model).backward()
        optimizer.step()


@faulty(0, "0.weight", _GRADIENTS, "On rank 1 they are 0.", "look for a clip or a factor")
def one_rank_clips(job: Job) -> None:
    model, optimizer = job.wrapped()
    for _ in range(12):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        if job.rank == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@faulty(4, "0.weight", _GRADIENTS, "on ranks 0 and 1, and other elements")
def one_rank_turns_a_gradient_around(job: Job) -> None:
    model, optimizer = job.wrapped()
    for step in passes(model, optimizer):
        if (step, job.rank) == (4, 1):
            grad = model.module[0].weight.grad
            assert grad is not None
            grad.neg_()
        optimizer.step()


@faulty(15, "0.weight", _GRADIENTS, "and 0 on rank 1", "a collective that loses data")
def data_lost_by_hand(job: Job) -> None:
    model, optimizer = job.bare()
    for step in passes(model, optimizer):
        average(model)
        if (step, job.rank) == (15, 1):
            _lose(model.get_parameter("0.weight"))
        optimizer.step()


def _lose(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.zero_()


def _skip(job: Job, model: nn.Module, *, rank: int, step: int, steps: int, lr: float = 0.1) -> None:
    """Train; one rank leaves out one update."""
    optimizer = job.sgd(model, lr)
    for number in passes(model, optimizer, steps=steps):
        if not isinstance(model, DistributedDataParallel):
            average(model)
        if (number, job.rank) != (step, rank):
            optimizer.step()


@faulty(11, "0.weight", _WEIGHTS, "Rank 1 has made 10 updates and rank 0 11", _SKIPPED)
def one_of_twelve_updates_skipped(job: Job) -> None:
    _skip(job, DistributedDataParallel(net()), rank=1, step=10, steps=12)


@faulty(5, "0.weight", _WEIGHTS, "Rank 1 has made 6 updates and rank 0 5", _SKIPPED)
def first_rank_skips_an_update(job: Job) -> None:
    # A single update moves the weights by less than ranks may differ by rounding.
    _skip(job, DistributedDataParallel(net()), rank=0, step=5, steps=12, lr=1e-5)


@faulty(38, "0.0.weight", _WEIGHTS, "Rank 1 has made 37 updates and rank 0 38", _SKIPPED)
def update_skipped_late(job: Job) -> None:
    """Of the later updates one in eight is compared."""
    layers = nn.Sequential(*(net(seed, out=16) for seed in range(6)))
    _skip(job, DistributedDataParallel(layers), rank=1, step=37, steps=39)


@faulty(2, "2.weight", _WEIGHTS, "never alike: broadcast the weights of rank 0")
def unlike_from_the_start(job: Job) -> None:
    model = net()
    torch.manual_seed(job.rank)
    # All of them have the same norm.
    nn.init.orthogonal_(model.get_parameter("2.weight"))
    optimizer = job.sgd(model)
    for _ in passes(model, optimizer):
        average(model)
        optimizer.step()


@faulty(10, "2.weight", _WEIGHTS, _ASSIGNED)
def weight_changed_on_one_rank(job: Job) -> None:
    model = DistributedDataParallel(net())
    _change(job, model, model.get_parameter("module.2.weight"))


@faulty(10, "0.2.weight", _WEIGHTS, _ASSIGNED)
def weight_changed_beside_own_heads(job: Job) -> None:
    body = net()
    torch.manual_seed(job.rank)
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(4, 3))
    _change(job, model, body.get_parameter("2.weight"), averaged=body)


@faulty(10, "1.2.bias", _WEIGHTS, _ASSIGNED)
def replicated_bias_changed_beside_parallel_layers(job: Job) -> None:
    model = nn.Sequential(nn.LayerNorm(16), net())
    plan = {"1.0": ColwiseParallel(), "1.2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (job.world,)), plan)
    _change(job, model, model.get_parameter("1.2.bias"), seed=1)


def _change(
    job: Job,
    model: nn.Module,
    weight: torch.Tensor,
    *,
    averaged: nn.Module | None = None,
    seed: int | None = None,
) -> None:
    """Train; the last rank changes a weight after ten updates."""
    optimizer = job.sgd(model, seed=seed)
    local = weight.to_local() if isinstance(weight, torch.distributed.tensor.DTensor) else weight
    for step in passes(model, optimizer):
        if averaged is not None:
            average(averaged)
        optimizer.step()
        if (step, job.rank) == (9, job.world - 1):
            with torch.no_grad():
                local.mul_(0.5)


@faulty(15, "0.weight", _WEIGHTS, _ASSIGNED)
def weight_changed_after_a_lone_update(job: Job) -> None:
    """The lone update is no fault: the weights are averaged after it."""
    model, optimizer = job.bare()
    for step in passes(model, optimizer):
        if step != 5:
            average(model)
        optimizer.step()
        average_weights(model)
        if (step, job.rank) == (14, 1):
            with torch.no_grad():
                model.get_parameter("0.weight").mul_(0.5)


@faulty(1, "0.weight", _WEIGHTS, _ASSIGNED)
def learning_rate_by_rank(job: Job) -> None:
    model = DistributedDataParallel(net())
    fit(model, job.sgd(model, 0.1 * (1 + job.rank)))


@faulty(10, "0.weight", "ranks 2, 3 differ in the gradients", _BYPASSED, world=4, rank=2)
def bypassed_in_the_second_pair(job: Job) -> None:
    model = DistributedDataParallel(net(seed=job.pair), process_group=job.pairs())
    optimizer = job.sgd(model)
    fit(model, optimizer, steps=10)
    fit(model.module if job.pair else model, optimizer)


@faulty(9, "1.weight", "ranks 1, 3 differ in the gradients of 1.weight", world=4, rank=1)
def data_lost_in_an_expert(job: Job) -> None:
    model, wrapper = experts(job)
    optimizer = job.sgd(model)
    for step in passes(wrapper, optimizer):
        if (step, job.rank) == (9, 3):
            _lose(model.get_parameter("1.module.weight"))
        optimizer.step()


@faulty(9, "", "ranks 0, 1 trained on the same data in 10 updates", "`DistributedSampler`")
def same_batches_on_all_ranks(job: Job) -> None:
    fit(*job.wrapped(seed=0))


@faulty(10, "2.weight", "ranks 1, 3 differ in the weights 2.weight", _ASSIGNED, world=4, rank=1)
def replica_of_shards_changed(job: Job) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)
    _change(job, model, model.get_parameter("2.weight"))


@faulty(10, "0.weight", "ranks 0, 1 differ in the weights 0.weight", _ASSIGNED, world=4)
def weight_changed_in_a_pair_by_hand(job: Job) -> None:
    group = job.pairs()
    model = net(seed=job.pair)
    optimizer = job.sgd(model)
    for step in passes(model, optimizer):
        average(model, group)
        optimizer.step()
        if (step, job.rank) == (9, 1):
            with torch.no_grad():
                model.get_parameter("0.weight").mul_(0.5)
    dist.barrier()
