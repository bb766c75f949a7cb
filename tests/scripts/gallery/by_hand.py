"""Trainings of several ranks without a wrapper around the model."""

import torch
import torch.distributed as dist
from common import STEPS, loss_of, mlp, sow, tell, train, training
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD


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


@training(2)
def gradients_averaged_and_clipped_by_hand():
    model = mlp()
    sow()
    average = averaging(model)

    def between():
        average()
        clip_grad_norm_(model.parameters(), 0.1)

    return train(model, SGD(model.parameters(), 0.1), before_update=between)


@training(2)
def local_updates_with_averaged_weights():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    sow()
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            for param in model.parameters():
                dist.all_reduce(param.detach())
                param.detach().div_(dist.get_world_size())
        tell(loss)
    return model


@training(2)
def local_updates_with_an_averager():
    model = mlp()
    optimizer, averager = (
        SGD(model.parameters(), 0.1),
        PeriodicModelAverager(period=3, warmup_steps=3),
    )
    sow()
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        tell(loss)
    return model


@training(1, 2)
def each_rank_trains_alone():
    model = mlp()
    sow()
    return train(model)


@training(2)
def a_sweep_of_learning_rates():
    model = mlp()
    return train(model, SGD(model.parameters(), 0.1 * (1 + dist.get_rank())))


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


@training(2)
def experts_of_each_rank():
    trunk, expert = mlp(), nn.Linear(4, 4)
    nn.init.normal_(expert.weight, std=0.1 * (1 + dist.get_rank()))
    optimizer = SGD([*trunk.parameters(), *expert.parameters()], 0.1)
    sow()
    train(lambda x: expert(trunk(x)), optimizer, before_update=averaging(trunk))
    return trunk, expert


@training(2)
def halves_of_a_model_sent_by_hand():
    rank = dist.get_rank()
    half = mlp() if rank == 0 else nn.Linear(4, 4)
    optimizer = SGD(half.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            out = half(torch.randn(8, 8))
            grad = torch.empty(8, 4)
            dist.send(out.detach(), 1)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            x = torch.empty(8, 4)
            dist.recv(x, 0)
            x.requires_grad_()
            loss = half(x).square().mean()
            loss.backward()
            dist.send(x.grad, 0)
            tell(loss)
        optimizer.step()
    return half
