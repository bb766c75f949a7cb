"""Trainings in which one parameter gets NaN once, which the default pack only reports."""

import warnings

import torch
import torch.distributed as dist
from common import loss_of, mlp, sow, train, training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD


class Rooted(nn.Module):
    """Adds the root of a parameter times 0: the gradient of the parameter is NaN."""

    def __init__(self, inner, rank=0):
        super().__init__()
        self.inner, self.extra = inner, nn.Parameter(torch.ones(4))
        self.calls, self.rank = 0, rank

    def forward(self, x):
        self.calls += self.training
        is_bad = self.calls == 6 and self.rank in (
            None,
            dist.get_rank() if dist.is_initialized() else 0,
        )
        used = self.extra.nan_to_num(1.0)
        return self.inner(x) + ((used * 0).sqrt() if is_bad else used * 0)


def fit(model, params, loss_of=loss_of):
    return train(model, SGD(params, 0.1), loss_of)


@training(healthy=False)
def a_nan():
    model = Rooted(mlp())
    return fit(model, model.parameters())


@training(healthy=False)
def a_nan_where_warnings_are_errors():
    warnings.simplefilter("error")
    model = Rooted(mlp())
    return fit(model, model.parameters())


@training(1, 2, healthy=False)
def a_nan_under_ddp():
    model = DDP(Rooted(mlp()))
    sow()
    return fit(model, model.parameters())


@training(1, 2, healthy=False)
def a_nan_on_a_rank_of_its_own():
    model = Rooted(mlp())
    sow()
    return fit(model, model.parameters())


@training(1, 2, healthy=False)
def a_nan_in_shards():
    model = Rooted(fully_shard(mlp()), rank=None)
    fully_shard(model)
    sow()
    return fit(model, model.parameters())


@training(1, 2, healthy=False)
def a_nan_above_shards():
    encoder, head = fully_shard(mlp()), Rooted(nn.Linear(4, 4))
    fit(lambda x: head(encoder(x)), [*encoder.parameters(), *head.parameters()])
    return encoder, head


@training(1, 2, healthy=False)
def a_nan_below_shards():
    head, decoder = Rooted(nn.Linear(8, 8)), fully_shard(mlp())
    head.extra = nn.Parameter(torch.ones(8))
    fit(lambda x: decoder(head(x)), [*head.parameters(), *decoder.parameters()])
    return head, decoder


@training(1, 2, healthy=False)
def a_nan_in_parallel_layers():
    plan = {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}
    model = parallelize_module(
        Rooted(mlp(), rank=None), init_device_mesh("cpu", (dist.get_world_size(),)), plan
    )
    torch.manual_seed(100)
    return fit(model, model.parameters())
