"""Trainings of models that `fully_shard` divides over ranks."""

import torch
import torch.distributed as dist
from common import STEPS, loss_of, mlp, sow, tell, train, train_by_sgd, training
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint


def layers(model=None, **options):
    model = model or mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(model, **options)
    sow()
    return model


@training(1, 2)
def fully_sharded():
    return train(layers())


@training(1, 2)
def fully_sharded_in_one_piece():
    model = fully_shard(mlp())
    sow()
    return train_by_sgd(model)


@training(1, 2)
def fully_sharded_and_whole_until_backward():
    return train_by_sgd(layers(reshard_after_forward=False))


@training(1, 2)
def a_partly_sharded_model_accumulates():
    model = nn.Sequential(mlp(), nn.Linear(4, 4))
    fully_shard(model[0])
    optimizer = SGD(model.parameters(), 0.1)
    sow()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            model[0].set_requires_gradient_sync(part == 2)
            loss = loss_of(model) / 3
            loss.backward()
        for param in model[1].parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        tell(loss)
    return model


@training(1, 2)
def fully_sharded_without_some_parameters():
    model = mlp()
    kept = set(model[4].parameters())
    fully_shard(model, ignored_params=kept)
    sow()

    def average():
        for param in kept:
            dist.all_reduce(param.grad)

    return train_by_sgd(model, before_update=average)


@training(1, 2)
def fully_sharded_in_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train_by_sgd(layers(mp_policy=policy))


@training(1, 2)
def fully_sharded_and_offloaded():
    return train_by_sgd(layers(offload_policy=CPUOffloadPolicy(pin_memory=False)))


@training(1, 2)
def fully_sharded_with_a_frozen_part():
    model = mlp()
    model[0].requires_grad_(False)
    layers(model)
    return train(model, SGD([p for p in model.parameters() if p.requires_grad], 0.1))


@training(1, 2)
def fully_sharded_with_clipped_gradients():
    model = layers()
    return train(
        model,
        SGD(model.parameters(), 0.1),
        before_update=lambda: clip_grad_norm_(model.parameters(), 0.1),
    )


@training(2)
def fully_sharded_by_columns():
    return train_by_sgd(layers(shard_placement_fn=lambda param: Shard(param.dim() - 1)))


@training(1, 2)
def fully_sharded_and_compiled():
    model = layers()
    model.compile(backend="eager")
    return train_by_sgd(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, words):
        return self.body(self.table(words)) @ self.table.weight.t()


@training(1, 2)
def fully_sharded_with_tied_weights():
    model = fully_shard(Tied())
    sow()

    def of(model):
        words = torch.randint(12, (16,))
        return functional.cross_entropy(model(words), (words + 1) % 12)

    return train_by_sgd(model, loss_of=of)


@training()
def simulated_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = layers()
    train_by_sgd(model)
    dist.destroy_process_group()
    return model


@training(2)
def replicas_of_shards():
    return train(
        layers(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    )


@training(2)
def shards_of_one_rank_in_replicas():
    return train_by_sgd(
        layers(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    )


@training(4)
def shards_of_parallel_layers_in_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
    model = parallelize_module(
        mlp(), mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["data"])
    # The ranks of a parallel layer get the same batches.
    torch.manual_seed(100 + mesh.get_coordinate()[0])
    return train_by_sgd(model)


@training(2)
def each_rank_shards_its_own_model():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = layers(mesh=DeviceMesh.from_group(groups[dist.get_rank()], "cpu"))
    return train_by_sgd(model, steps=STEPS + 4 * dist.get_rank())
