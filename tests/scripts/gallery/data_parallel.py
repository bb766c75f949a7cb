"""Trainings under `DistributedDataParallel`: each rank holds all of the model."""

import contextlib

import torch
import torch.distributed as dist
from common import STEPS, loss_of, mlp, sow, tell, train, training
from torch import nn
from torch.amp import GradScaler
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint


def under_ddp(model=None, **options):
    model = DDP(model or mlp(), **options)
    sow()
    return model


@training(1, 2)
def ddp():
    model = under_ddp()
    return train(model)


@training(2)
def ddp_with_bucket_views_in_small_buckets():
    model = under_ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    return train(model)


@training(1, 2)
def ddp_with_a_static_graph():
    model = under_ddp(static_graph=True)
    return train(model)


@training(1, 2)
def ddp_accumulates():
    model = under_ddp()
    optimizer = AdamW(model.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with contextlib.nullcontext() if part == 2 else model.no_sync():
                loss = loss_of(model) / 3
                loss.backward()
        optimizer.step()
        tell(loss)
    return model


@training(2)
def ddp_averages_each_micro_batch():
    model = under_ddp()
    optimizer = AdamW(model.parameters(), 1e-2)
    for step in range(2 * STEPS):
        loss = loss_of(model) / 2
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            tell(loss)
    return model


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x):
        return self.heads[int(x[0, 0] > 0)](torch.tanh(self.trunk(x)))


@training(1, 2)
def ddp_with_unused_branches():
    model = under_ddp(Branches(), find_unused_parameters=True)
    return train(model, steps=2 * STEPS)


@training(2)
def ddp_with_a_frozen_part():
    net = mlp()
    net[0].requires_grad_(False)
    model = under_ddp(net)
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def ddp_with_batch_norms_of_each_rank():
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    )
    for param in net.parameters():
        dist.broadcast(param.detach(), 0)
    model = under_ddp(net, broadcast_buffers=False)
    return train(model)


@training(1, 2)
def ddp_with_batch_norms():
    model = under_ddp(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    )
    return train(model)


@training(2)
def ddp_ignores_a_parameter():
    net = mlp()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["4.bias"])
    model = under_ddp(net)
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def ddp_clips_and_scales():
    model, scaler = under_ddp(), GradScaler("cpu", init_scale=2.0**10)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        tell(loss)
    return model


@training(1, 2)
def ddp_with_checkpoints():
    model = under_ddp()

    def of(model):
        x = torch.randn(8, 8)
        return (checkpoint(model, x, use_reentrant=False) - x[:, :4]).square().mean()

    return train(model, loss_of=of)


@training(2)
def ddp_with_reentrant_checkpoints_inside():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(8, 8), mlp()

        def forward(self, x):
            return checkpoint(self.rest, self.first(x), use_reentrant=True)

    model = under_ddp(Whole(), static_graph=True)
    return train(model)


@training(2)
def ddp_of_compiled_code():
    model = under_ddp(torch.compile(mlp(), backend="aot_eager"))
    return train(model)


@training(2)
def compiled_ddp():
    model = under_ddp()
    return train(torch.compile(model, backend="eager"), AdamW(model.parameters(), 1e-2))


@training(2)
def ddp_with_lbfgs():
    model = under_ddp()
    optimizer = LBFGS(model.parameters(), lr=0.3, max_iter=4)
    x = torch.randn(16, 8)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        # All ranks must stop together.
        dist.all_reduce(loss.detach())
        return loss

    for _ in range(6):
        tell(optimizer.step(closure))
    return model


@training(1, 2)
def two_models_under_ddp():
    generator, critic = (
        under_ddp(),
        under_ddp(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))),
    )
    ours, theirs = Adam(generator.parameters(), 1e-2), Adam(critic.parameters(), 1e-2)
    for _ in range(STEPS):
        theirs.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(8, 8))
        loss = critic(torch.cat([fake, torch.randn(8, 4)])).square().mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        (-critic.module(generator(torch.randn(8, 8))).mean()).backward()
        ours.step()
        tell(loss)
    return generator, critic


@training(2)
def a_plain_head_on_a_body_under_ddp():
    body, head = under_ddp(), nn.Linear(4, 4)
    for param in head.parameters():
        dist.broadcast(param.detach(), 0)
    optimizer = AdamW([*body.parameters(), *head.parameters()], 1e-2)

    def average():
        for param in head.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    train(lambda x: head(body(x)), optimizer, before_update=average)
    return body, head


@training(1, 2)
def ddp_sends_half_precision():
    model = under_ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def ddp_sends_by_its_own_hook():
    model = under_ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def ddp_sends_low_ranks():
    model = under_ddp()
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def ddp_averages_weights_now_and_then():
    model = under_ddp()
    state = PostLocalSGDState(
        process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=4
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=4)
    return train(model, PostLocalSGDOptimizer(SGD(model.parameters(), 0.1), averager))


@training(1, 2)
def ddp_with_divided_state():
    model = under_ddp()
    return train(model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2))


@training(2)
def ddp_with_divided_state_in_buckets():
    model = under_ddp()
    return train(
        model,
        ZeroRedundancyOptimizer(model.parameters(), SGD, parameters_as_bucket_view=True, lr=0.1),
    )


@training(1, 2)
def ddp_with_uneven_inputs():
    model = under_ddp()
    optimizer = SGD(model.parameters(), 0.1)
    with model.join():
        train(model, optimizer, steps=STEPS + dist.get_rank())
    return model


@training(2)
def ddp_and_divided_state_with_uneven_inputs():
    model = under_ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, steps=STEPS + dist.get_rank())
    return model


@training(2)
def ddp_updates_inside_its_hook():
    net = mlp()
    optimizers = {param: SGD([param], 0.1) for param in net.parameters()}

    def average_and_update(_, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def update(future):
            buffer = future.value()[0] / dist.get_world_size()
            offset = 0
            for param in bucket.parameters():
                param.grad = buffer[offset : offset + param.numel()].view_as(param)
                offset += param.numel()
                optimizers[param].step()
            return buffer

        return future.then(update)

    model = under_ddp(net)
    model.register_comm_hook(None, average_and_update)
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        model.zero_grad()
        tell(loss)
    return model


@training(2)
def ddp_in_a_group_of_each_rank():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = under_ddp(process_group=groups[dist.get_rank()])
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def trains_before_the_wrapper():
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)
    sow()
    train(net, optimizer, steps=4)
    return train(DDP(net), optimizer)


@training(1, 2)
def replicated():
    model = replicate(mlp())
    sow()
    return train(model)


@training(2)
def one_rank_leaves_an_update_out():
    model = under_ddp()
    optimizer = SGD(model.parameters(), 0.0)
    for step in range(12):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if step != 5 or dist.get_rank() != 1:
            optimizer.step()
        tell(loss)
    return model
