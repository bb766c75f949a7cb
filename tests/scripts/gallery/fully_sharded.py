"""Trainings of models that `fully_shard` divides over ranks."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as whole_states
from common import STEPS, loss_of, mlp, sow, tell, train, training
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
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
    model = layers()
    return train(model)


@training(1, 2)
def fully_sharded_in_one_piece():
    model = fully_shard(mlp())
    sow()
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def fully_sharded_and_whole_until_backward():
    model = layers(reshard_after_forward=False)
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def fully_sharded_and_whole_until_the_update():
    model = layers()
    model.set_reshard_after_backward(False)
    optimizer = SGD(model.parameters(), 0.1)
    for step in range(2 * STEPS):
        loss = loss_of(model) / 2
        loss.backward()
        if step % 2:
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            optimizer.step()
            optimizer.zero_grad()
            tell(loss)
    return model


@training(1, 2)
def fully_sharded_accumulates():
    model = layers()
    optimizer = AdamW(model.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss = loss_of(model) / 3
            loss.backward()
        optimizer.step()
        tell(loss)
    return model


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

    return train(model, SGD(model.parameters(), 0.1), before_update=average)


@training(1, 2)
def plain_head_on_a_sharded_encoder():
    encoder, head = fully_shard(mlp()), nn.Linear(4, 4)
    optimizer = SGD([*encoder.parameters(), *head.parameters()], 0.1)
    train(lambda x: head(encoder(x)), optimizer)
    return encoder, head


@training(1, 2)
def head_under_ddp_on_a_sharded_encoder():
    encoder, head = fully_shard(mlp()), DDP(nn.Linear(4, 4))
    optimizers = AdamW(encoder.parameters(), 1e-2), SGD(head.parameters(), 0.1)
    sow()
    for _ in range(STEPS):
        loss = loss_of(lambda x: head(encoder(x)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tell(loss)
    return encoder, head


@training(2)
def sharded_critic_below_an_actor_under_ddp():
    actor, critic = DDP(mlp()), fully_shard(mlp())
    ours, theirs = Adam(actor.parameters(), 1e-2), Adam(critic.parameters(), 1e-2)
    sow()
    for _ in range(STEPS):
        x = torch.randn(8, 8)
        theirs.zero_grad()
        loss = (critic(x) - x[:, :4]).square().mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        (critic(torch.cat([actor(x), actor(x)], 1)).mean()).backward()
        ours.step()
        tell(loss)
    return actor, critic


@training(1, 2)
def fully_sharded_in_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = layers(mp_policy=policy)
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def fully_sharded_and_offloaded():
    model = layers(offload_policy=CPUOffloadPolicy(pin_memory=False))
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def fully_sharded_with_checkpoints():
    model = mlp()

    class Block(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = nn.Sequential(
        *(
            Block(fully_shard(module)) if isinstance(module, nn.Linear) else module
            for module in model
        )
    )
    fully_shard(model)
    sow()
    return train(model, SGD(model.parameters(), 0.1))


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


@training(1, 2)
def fully_sharded_and_scaled():
    # One rank has no part of the last layer.
    model = layers(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)))
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        tell(loss)
    return model


@training(2)
def fully_sharded_by_columns():
    model = layers(shard_placement_fn=lambda param: Shard(param.dim() - 1))
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def fully_sharded_and_compiled():
    model = layers()
    model.compile(backend="eager")
    return train(model, SGD(model.parameters(), 0.1))


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

    return train(model, SGD(model.parameters(), 0.1), of)


@training(1, 2)
def the_loss_takes_weights_of_a_sharded_model():
    encoder, head = fully_shard(mlp(), reshard_after_forward=False), nn.Linear(4, 4)
    optimizer = SGD([*encoder.parameters(), *head.parameters()], 0.1)
    sow()

    def of(_):
        x = torch.randn(8, 8)
        out = head(encoder(x))
        return (functional.linear(out, encoder[4].weight.t()) - 1).square().mean()

    train(encoder, optimizer, of)
    return encoder, head


@training(1, 2)
def fully_sharded_from_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    layers(model)
    model.to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        whole = torch.empty(param.shape).uniform_(
            -0.3, 0.3, generator=torch.Generator().manual_seed(number)
        )
        param.detach().copy_(distribute_tensor(whole, param.device_mesh, param.placements))
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def fully_sharded_saves_and_loads():
    model = layers()
    optimizer = AdamW(model.parameters(), 1e-2)
    train(model, optimizer, steps=8)
    options = whole_states.StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = copy.deepcopy(
        whole_states.get_state_dict(model, optimizer, options=options)
    )
    train(model, optimizer, steps=4)
    whole_states.set_state_dict(
        model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options
    )
    return train(model, optimizer)


@training()
def simulated_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = layers()
    train(model, SGD(model.parameters(), 0.1))
    dist.destroy_process_group()
    return model


@training(1, 2)
def fully_sharded_with_several_optimizers():
    model = layers()
    optimizers = SGD(model[0].parameters(), 0.1), Adam(model[2:].parameters(), 1e-2)
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tell(loss)
    return model


@training(2)
def fully_sharded_and_idle_at_first():
    model = fully_shard(mlp())
    optimizer = SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model) * (step > 5)
        loss.backward()
        optimizer.step()
        tell(loss)
    return model


@training(2)
def fully_sharded_and_evaluated():
    model = layers()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS // 4):
        train(model, optimizer, steps=4)
        model.eval()
        with torch.no_grad():
            tell(loss_of(model))
        model.train()
    return model


@training(2)
def replicas_of_shards():
    model = layers(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    return train(model)


@training(4)
def replicas_of_shards_in_two_dimensions():
    model = layers(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def shards_of_one_rank_in_replicas():
    model = layers(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return train(model, SGD(model.parameters(), 0.1))


@training(1, 2)
def shards_of_parallel_layers():
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "parts"))
    model = parallelize_module(
        mlp(), mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["data"])
    torch.manual_seed(100)
    return train(model)


@training(4)
def shards_of_parallel_layers_in_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
    model = parallelize_module(
        mlp(), mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["data"])
    # The ranks of a parallel layer get the same batches.
    torch.manual_seed(100 + mesh.get_coordinate()[0])
    return train(model, SGD(model.parameters(), 0.1))


@training(2)
def each_rank_shards_its_own_model():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = layers(mesh=DeviceMesh.from_group(groups[dist.get_rank()], "cpu"))
    return train(model, SGD(model.parameters(), 0.1), steps=STEPS + 4 * dist.get_rank())
