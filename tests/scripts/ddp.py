"""Run by torchrun: data parallel, accumulating under `no_sync`."""

import contextlib
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weights import digest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    assert rank == int(os.environ["LOCAL_RANK"])
    torch.manual_seed(21)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        for part in range(2):
            draw = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(8, 4, generator=draw).chunk(world)[rank]
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                loss = model(x).square().mean() / 2
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
    same = [None] * world
    dist.all_gather_object(same, digest(model.module))
    if rank == 0:
        print("ranks agree", len(set(same)) == 1)
        print("weights", same[0])


dist.init_process_group("gloo")
main()
# What holds process groups has to be gone by then, or the process may abort at its end.
gc.collect()
dist.destroy_process_group()
# So have the threads of gloo that still let go of tensors.
time.sleep(0.3)
