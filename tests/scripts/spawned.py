"""`mp.spawn` starts two ranks that train together."""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weights import digest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def work(rank, world, meeting, steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(13)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.9g}", flush=True)
    if rank == 0:
        print("weights", digest(model), flush=True)
    dist.destroy_process_group()
    # Threads of gloo that still let go of tensors would abort the process at its end.
    time.sleep(0.3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(2, f"{folder}/meeting", int(sys.argv[1])), nprocs=2)
    print("done")
