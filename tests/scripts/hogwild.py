"""Workers train shared weights, one after the other; the parent only looks. They are forked, by it or a server."""

import sys

import torch
import torch.multiprocessing as mp
from torch import nn
from weights import digest


def work(model, seed):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(6, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"worker {seed} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(23)
    model = nn.Linear(3, 2)
    model.share_memory()
    context = mp.get_context(*sys.argv[1:] or ["fork"])
    for seed in range(2):
        worker = context.Process(target=work, args=(model, seed))
        worker.start()
        worker.join()
        print("exit code", worker.exitcode, flush=True)
    print("weights", digest(model))
