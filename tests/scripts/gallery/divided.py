"""Trainings of models whose layers, or operations, are divided over ranks."""

import torch
import torch.distributed as dist
from common import STEPS, mlp, tell, train, train_by_sgd, training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallel(plan, model=None):
    # All ranks of a parallel model get the same batches.
    model = parallelize_module(model or mlp(), mesh(), plan)
    torch.manual_seed(100)
    return model


@training(1, 2)
def parallel_layers():
    return train(parallel({"0": ColwiseParallel(), "2": RowwiseParallel()}))


@training(1, 2)
def a_parallel_loss():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = parallel(
        {
            "0": ColwiseParallel(),
            "2": ColwiseParallel(
                input_layouts=Shard(-1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
        model,
    )
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with loss_parallel():
            loss = functional.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4)
            loss.backward()
        optimizer.step()
        tell(loss.full_tensor())
    return model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


@training(1, 2)
def parallel_sequences():
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(Block(), mesh(), plan)
    model = parallelize_module(
        model,
        mesh(),
        PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
    )
    torch.manual_seed(100)

    def of(model):
        return model(torch.randn(2, 4, 8)).square().mean()

    return train_by_sgd(model, loss_of=of)


@training(1, 2)
def a_parallel_embedding():
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    model = parallel(
        {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "1": ColwiseParallel(output_layouts=Replicate()),
        },
        model,
    )

    def of(model):
        words = torch.randint(12, (16,))
        return functional.cross_entropy(model(words), (words + 1) % 12)

    return train(model, Adam(model.parameters(), 1e-2), of)


@training(2)
def parallel_layers_under_ddp_of_one_rank():
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "parts"))
    model = parallelize_module(
        mlp(), whole["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    model = DDP(model, device_mesh=whole["data"])
    torch.manual_seed(100)
    return train(model)


@training(1, 2)
def a_distributed_module():
    model = distribute_module(mlp(), mesh())
    torch.manual_seed(100)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = distribute_tensor(torch.randn(8, 8), mesh(), [Shard(0)])
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        tell(loss.full_tensor())
    return model


def pipeline(schedule, stages_per_rank=1, micro_batches=4):
    rank, world = dist.get_rank(), dist.get_world_size()
    count, parts = world * stages_per_rank, []
    for number in range(rank, count, world):
        torch.manual_seed(number)
        parts.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    stages = [
        PipelineStage(part, rank + world * i, count, torch.device("cpu"))
        for i, part in enumerate(parts)
    ]
    loss_fn = lambda out, y: (out - y).square().mean()
    run = schedule(stages if stages_per_rank > 1 else stages[0], micro_batches, loss_fn=loss_fn)
    optimizer = SGD([p for part in parts for p in part.parameters()], 0.1)
    torch.manual_seed(100)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, losses = torch.randn(8, 8), []
        args = (x,) if rank == 0 else ()
        if rank == world - 1:
            run.step(*args, target=x.flip(1), losses=losses)
            tell(sum(losses))
        else:
            run.step(*args)
        optimizer.step()
    return parts


@training(1, 2)
def a_pipeline():
    return pipeline(ScheduleGPipe)


@training(2)
def an_interleaved_pipeline():
    return pipeline(ScheduleInterleaved1F1B, stages_per_rank=2)
