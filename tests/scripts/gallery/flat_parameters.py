"""Trainings under `FullyShardedDataParallel`, which joins parameters in flat ones."""

import contextlib

import torch
from common import STEPS, loss_of, mlp, sow, tell, train, training
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, AdamW


def wrapped(model=None, *, each=True, **options):
    policy = ModuleWrapPolicy({nn.Linear}) if each else None
    model = FSDP(model or mlp(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)
    sow()
    return model


@training(1, 2)
def flat():
    model = wrapped()
    return train(model)


@training(1, 2)
def flat_in_one_piece():
    model = wrapped(each=False)
    return train(model)


@training(1, 2)
def flat_with_original_parameters():
    model = wrapped(use_orig_params=True)
    return train(model)


@training(2)
def flat_and_whole_until_backward():
    model = wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    return train(model)


@training(2)
def flat_and_not_sharded():
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    return train(model)


@training(2)
def flat_in_mixed_precision():
    model = wrapped(
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    return train(model)


@training(2)
def flat_accumulates_and_clips():
    model = wrapped(use_orig_params=True)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with contextlib.nullcontext() if part else model.no_sync():
                loss = loss_of(model) / 2
                loss.backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        tell(loss)
    return model


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


@training(2)
def flat_with_a_frozen_part():
    net = mlp()
    net[0].requires_grad_(False)
    model = wrapped(net, use_orig_params=True)
    return train(model, AdamW([p for p in model.parameters() if p.requires_grad], 1e-2))
