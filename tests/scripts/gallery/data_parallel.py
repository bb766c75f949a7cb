"""Trainings under `DistributedDataParallel`: each rank holds all of the model."""

import torch
import torch.distributed as dist
from common import STEPS, loss_of, mlp, sow, tell, train, train_by_sgd, training
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.checkpoint import checkpoint


def under_ddp(model=None, **options):
    model = DDP(model or mlp(), **options)
    sow()
    return model


@training(1, 2)
def ddp():
    return train(under_ddp())


@training(2)
def ddp_with_bucket_views_in_small_buckets():
    return train(under_ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.0001))


@training(1, 2)
def ddp_with_a_static_graph():
    return train(under_ddp(static_graph=True))


@training(2)
def ddp_with_a_frozen_part():
    net = mlp()
    net[0].requires_grad_(False)
    return train_by_sgd(under_ddp(net))


@training(2)
def ddp_with_batch_norms_of_each_rank():
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    )
    for param in net.parameters():
        dist.broadcast(param.detach(), 0)
    return train(under_ddp(net, broadcast_buffers=False))


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

    return train(under_ddp(Whole(), static_graph=True))


@training(2)
def ddp_of_compiled_code():
    return train(under_ddp(torch.compile(mlp(), backend="aot_eager")))


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
def ddp_sends_half_precision():
    model = under_ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train_by_sgd(model)


@training(2)
def ddp_sends_low_ranks():
    model = under_ddp()
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train_by_sgd(model)


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
    return train_by_sgd(under_ddp(process_group=groups[dist.get_rank()]))


@training(1, 2)
def replicated():
    model = replicate(mlp())
    sow()
    return train(model)
