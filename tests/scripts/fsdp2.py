"""Run by torchrun: fully sharded parameters."""

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weights import digest


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.mlp(self.norm(x)).relu()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(22)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = (model(x) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
    options = StateDictOptions(full_state_dict=True)
    whole = Stack()
    whole.load_state_dict(get_model_state_dict(model, options=options) or whole.state_dict())
    if rank == 0:
        print("weights", digest(whole))


dist.init_process_group("gloo")
main()
# What holds process groups has to be gone by then, or the process may abort at its end.
gc.collect()
dist.destroy_process_group()
# So have the threads of gloo that still let go of tensors.
time.sleep(0.3)
