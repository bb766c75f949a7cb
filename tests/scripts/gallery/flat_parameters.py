"""Trainings under `FullyShardedDataParallel`, which joins parameters in flat ones."""

import torch
from common import STEPS, loss_of, mlp, sow, tell, train, training
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, AdamW


def wrapped(model=None, *, each=True, **options):
    policy = ModuleWrapPolicy({nn.Linear}) if each else None
    model = FSDP(model or mlp(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)
    sow()
    return model


@training(1, 2)
def flat():
    return train(wrapped())


@training(1, 2)
def flat_with_original_parameters():
    return train(wrapped(use_orig_params=True))


@training(2)
def flat_and_not_sharded():
    return train(wrapped(sharding_strategy=ShardingStrategy.NO_SHARD))


@training(1, 2)
def plain_head_on_a_flat_encoder():
    encoder, head = wrapped(use_orig_params=True), nn.Linear(4, 4)
    optimizers = AdamW(encoder.parameters(), 1e-2), SGD(head.parameters(), 0.1)
    for _ in range(STEPS):
        loss = loss_of(lambda x: head(encoder(x)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tell(loss)
    return encoder, head
