"""Trainings on several ranks in which nothing is wrong, however much the ranks differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed.rank_job import (
    STEPS,
    Job,
    average,
    average_weights,
    data,
    fit,
    loss_of,
    net,
    passes,
)
from small import sgd, weights_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

Case = Callable[[Job], None]
# By the number of ranks.
HEALTHY: dict[int, dict[str, Case]] = {2: {}, 4: {}}


def healthy(case: Case) -> Case:
    HEALTHY[2][case.__name__] = case
    return case


def on_four_ranks(case: Case) -> Case:
    HEALTHY[4][case.__name__] = case
    return case


@healthy
def every_other_update_alone(job: Job) -> None:
    """Half of the updates follow a pass under `no_sync`, and each rank makes them alone."""
    model, optimizer = job.wrapped()
    for step in range(STEPS):
        optimizer.zero_grad()
        model.require_backward_grad_sync = step % 2 == 1
        loss_of(model).backward()
        optimizer.step()


def _last_pass_alone(job: Job, *, averages_gradients: bool) -> None:
    model, optimizer = job.wrapped()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        with model.no_sync():
            loss_of(model).backward()
        if averages_gradients:
            average(model)
        optimizer.step()
        average_weights(model)


@healthy
def averaged_by_the_script_after_no_sync(job: Job) -> None:
    _last_pass_alone(job, averages_gradients=True)


@healthy
def weights_averaged_after_a_last_pass_alone(job: Job) -> None:
    _last_pass_alone(job, averages_gradients=False)


@healthy
def overflow_on_one_rank(job: Job) -> None:
    model, optimizer = job.wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = float("inf") if (step, job.rank) == (7, 1) else 1.0
        scaler.scale(factor * loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()


@healthy
def evaluating_other_weights_on_one_rank(job: Job) -> None:
    """One rank evaluates a moving average in the place of the weights, and keeps it at the end."""
    model, optimizer = job.wrapped()
    averaged = copy.deepcopy(model.module.state_dict())
    for _ in passes(model, optimizer):
        optimizer.step()
        weights = copy.deepcopy(model.module.state_dict())
        for name, weight in weights.items():
            averaged[name].lerp_(weight, 0.1)
        if job.rank == 0:
            model.module.load_state_dict(averaged)
            with torch.no_grad():
                model.module(data())
            model.module.load_state_dict(weights)
    if job.rank == 0:
        model.module.load_state_dict(averaged)


@healthy
def probing_on_one_rank(job: Job) -> None:
    """One rank runs passes of its own, and clears their gradients."""
    model, optimizer = job.wrapped()
    for step in range(STEPS):
        if job.rank == 0 and step % 3 == 0:
            loss_of(model.module).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@healthy
def joining_later(job: Job) -> None:
    """One rank has trained before the others come."""
    model, optimizer = job.bare()
    if job.rank == 0:
        fit(model, optimizer, steps=5)
    fit(DistributedDataParallel(model), optimizer)


@healthy
def wrapped_anew(job: Job) -> None:
    model = net()
    model[0].requires_grad_(requires_grad=False)
    wrapper = DistributedDataParallel(model)
    optimizer = sgd(model[2])
    job.watch(model, optimizer)
    fit(wrapper, optimizer, steps=10)
    model[0].requires_grad_(requires_grad=True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    # The old wrapper is still there.
    again = DistributedDataParallel(model)
    fit(again, optimizer)
    del wrapper


@healthy
def training_apart_after_the_wrapper(job: Job) -> None:
    model, optimizer = job.bare()
    wrapper = DistributedDataParallel(model)
    fit(wrapper, optimizer, steps=10)
    del wrapper
    fit(model, optimizer)


@healthy
def several_wrappers(job: Job) -> None:
    first = DistributedDataParallel(net(out=16))
    second = DistributedDataParallel(net(seed=1))
    model = nn.Sequential(first, second)
    optimizers = sgd(first), sgd(second)
    job.watch(model, *optimizers)
    for step in passes(model, *optimizers):
        optimizers[0].step()
        if step % 2:
            optimizers[1].step()


@healthy
def own_head_beside_ddp(job: Job) -> None:
    """The gradient of the bias is 1 on all ranks, whose heads have nothing in common."""
    body = DistributedDataParallel(net())
    torch.manual_seed(job.rank)
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(4, 1))
    optimizer = job.sgd(model, 0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(data()).mean().backward()
        optimizer.step()


@healthy
def own_expert(job: Job) -> None:
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(16, 16), net())
    ignored = [f"0.{name}" for name, _ in model[0].named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapper = DistributedDataParallel(model)
    fit(wrapper, job.sgd(model))


@healthy
def zero_by_hand(job: Job) -> None:
    """Each rank updates every other parameter, and sends it to the others."""
    model = DistributedDataParallel(net())
    params = list(model.parameters())
    optimizer = Adam(params[job.rank :: job.world], 0.01)
    job.watch(model, optimizer)
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        for number, param in enumerate(params):
            dist.broadcast(param.data, number % job.world)


@healthy
def local_sgd_by_a_hook(job: Job) -> None:
    groups = [dist.new_group([rank]) for rank in range(job.world)]
    model = DistributedDataParallel(net())
    state = local_sgd.PostLocalSGDState(None, groups[job.rank], start_localSGD_iter=8)
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)
    optimizer = job.sgd(model)
    averager = PeriodicModelAverager(period=4, warmup_steps=8)
    for _ in passes(model, optimizer):
        optimizer.step()
        averager.average_parameters(model.parameters())


@healthy
def weights_averaged_after_lone_updates(job: Job) -> None:
    """Some updates are made alone, and all weights are averaged after each."""
    model, optimizer = job.bare()
    for step in passes(model, optimizer):
        if step % 5 != 4:
            average(model)
        optimizer.step()
        average_weights(model)


@healthy
def inner_and_outer_updates(job: Job) -> None:
    """As in DiLoCo: ranks train alone, and an outer optimizer moves all by the mean of what they did."""
    model = net()
    inner, outer = sgd(model, 0.05), SGD(model.parameters(), 0.7, 0.9)
    job.watch(model, inner, outer)
    for _ in range(8):
        begin = weights_of(model)
        fit(model, inner, steps=3)
        for param, weight in zip(model.parameters(), begin, strict=True):
            param.grad = weight - param.detach()
            param.data.copy_(weight)
        average(model)
        outer.step()


class Sharpness(Optimizer):
    """Updates by the gradient at weights that each rank has moved along its own gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = SGD(self.param_groups, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        moves = [0.05 * param.grad / param.grad.norm() for param in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
        self.base.step()


@healthy
def sharpness_aware(job: Job) -> None:
    model = DistributedDataParallel(net())
    optimizer = Sharpness(model.parameters())
    job.watch(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model).backward()
        optimizer.step(lambda: loss_of(model).backward())


@healthy
def averaging_in_hooks(job: Job) -> None:
    model, optimizer = job.bare()

    def reduce(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    fit(model, optimizer)


@healthy
def parting(job: Job) -> None:
    """Ranks average for some updates, then train apart."""
    model, optimizer = job.bare()
    for step in passes(model, optimizer):
        if step < 10:
            average(model)
        optimizer.step()


@healthy
def uneven_accumulation_by_hand(job: Job) -> None:
    model, optimizer = job.bare()
    for _ in passes(model, optimizer):
        for _ in range(job.rank):
            loss_of(model).backward()
        average(model)
        optimizer.step()


@healthy
def parameter_server(job: Job) -> None:
    model, optimizer = job.bare()
    for _ in range(STEPS):
        model.zero_grad(set_to_none=False)
        (job.rank * loss_of(model)).backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.reduce(param.grad, 0)
        if job.rank == 0:
            optimizer.step()
        for param in model.parameters():
            dist.broadcast(param.data, 0)


@healthy
def sweep_of_learning_rates(job: Job) -> None:
    """A warm-up begins so low that the gradients do not show yet that the biases differ."""
    model = net()
    nn.init.zeros_(model.get_parameter("0.bias"))
    nn.init.zeros_(model.get_parameter("2.bias"))
    optimizer = Adam(model.parameters())
    job.watch(model, optimizer, seed=7)
    for step in passes(model, optimizer):
        optimizer.param_groups[0]["lr"] = (1 + job.rank) * 10.0 ** min(-2, step - 14)
        optimizer.step()


@healthy
def sweep_of_clipped_models(job: Job) -> None:
    """The norm of each gradient is that of the clip, which follows a schedule, on all ranks."""
    model = net(seed=job.rank)
    optimizer = job.sgd(model)
    for step in passes(lambda x: 100 * model(x), optimizer):
        for param in model.parameters():
            nn.utils.clip_grad_norm_(param, 1.0 / (1 + step))
        optimizer.step()


@healthy
def sweep_of_a_linear_model(job: Job) -> None:
    torch.manual_seed(job.rank)
    model = nn.Linear(16, 1)
    optimizer = job.sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(8, 16)).mean().backward()
        optimizer.step()


@healthy
def sharded(job: Job) -> None:
    """Each rank holds and updates its part of each parameter; at first all gradients are 0."""
    model = net()
    fully_shard(model)
    optimizer = job.sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (float(step > 5) * loss_of(model)).backward()
        optimizer.step()


def _through_stages(model: nn.Module, optimizer: SGD, stage: int, other: int) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        if stage == 0:
            out = model(data())
            dist.send(out.detach(), other)
            grad = torch.empty_like(out)
            dist.recv(grad, other)
            out.backward(grad)
        else:
            x = torch.empty(8, 16)
            dist.recv(x, other)
            x.requires_grad_()
            model(x).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, other)
        optimizer.step()


@on_four_ranks
def pipeline_of_pairs(job: Job) -> None:
    torch.manual_seed(job.pair)
    stage = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = DistributedDataParallel(stage, process_group=job.pairs())
    _through_stages(model, job.sgd(model), job.pair, (job.rank + 2) % 4)


@on_four_ranks
def pairs(job: Job) -> None:
    """Two trainings, of which one takes longer."""
    model = DistributedDataParallel(net(seed=job.pair), process_group=job.pairs())
    fit(model, job.sgd(model), steps=STEPS + 4 * job.pair)


@on_four_ranks
def pairs_that_meet(job: Job) -> None:
    model = DistributedDataParallel(net(), process_group=job.pairs())
    optimizer = job.sgd(model)
    for step in passes(model, optimizer):
        optimizer.step()
        if step % 6 == 5:
            average_weights(model)


@healthy
def gathered_contrastive_loss(job: Job) -> None:
    """All ranks have one loss, of the embeddings of all batches."""
    model, optimizer = job.wrapped()
    for _ in range(STEPS):
        optimizer.zero_grad()
        own = model(data())
        gathered = [torch.empty_like(own) for _ in range(job.world)]
        dist.all_gather(gathered, own.detach())
        gathered[job.rank] = own
        embeddings = torch.cat(gathered)
        (embeddings @ embeddings.T).logsumexp(1).mean().backward()
        optimizer.step()


@on_four_ranks
def pairs_that_share_a_batch(job: Job) -> None:
    """The ranks of a pair compute parts of a model, as tensor-parallel ranks do; DDP averages across the pairs."""
    model = DistributedDataParallel(net(), process_group=job.across())
    optimizer = job.sgd(model, seed=job.pair)
    fit(model, optimizer)


@on_four_ranks
def gossip_of_gradients(job: Job) -> None:
    groups = job.pairs(), job.across()
    model, optimizer = job.bare()
    for step in passes(model, optimizer):
        average(model, groups[step % 2])
        optimizer.step()


@on_four_ranks
def sums_in_another_order(job: Job) -> None:
    """Each rank adds up the gradients of all, beginning with its own."""
    model, optimizer = job.bare()
    for _ in passes(model, optimizer):
        for param in model.parameters():
            assert param.grad is not None
            grads = [torch.empty_like(param.grad) for _ in range(job.world)]
            dist.all_gather(grads, param.grad)
            ordered = grads[job.rank :] + grads[: job.rank]
            param.grad = torch.stack(ordered).sum(0)
        optimizer.step()
