"""Trainings of several ranks without a wrapper around the model."""

import torch
import torch.distributed as dist
from common import STEPS, mlp, sow, train, training
from torch.distributed.optim import ZeroRedundancyOptimizer


def averaging(model):
    def average():
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    return average


@training(1, 2)
def gradients_averaged_by_hand():
    model = mlp()
    sow()
    return train(model, before_update=averaging(model))


@training(1, 2)
def each_rank_trains_alone():
    model = mlp()
    sow()
    return train(model)


@training(2)
def a_model_of_its_own_on_each_rank():
    model = mlp(16 + 8 * dist.get_rank())
    sow()
    return train(model)


@training(2)
def only_rank_0_trains():
    model = mlp()
    if dist.get_rank() == 0:
        train(model)
    for param in model.parameters():
        dist.broadcast(param.detach(), 0)
    return model


@training(2)
def rank_1_takes_longer():
    model = mlp()
    sow()
    return train(model, steps=STEPS * (1 + 3 * dist.get_rank()))


@training(2)
def divided_state_without_a_wrapper():
    model = mlp()
    sow()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return train(model, optimizer, before_update=averaging(model))
