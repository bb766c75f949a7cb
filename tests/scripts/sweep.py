"""A sweep: one process per learning rate, none of which knows of the others."""

import multiprocessing

import torch
from torch import nn
from weights import digest


def trial(lr, results):
    torch.set_num_threads(1)
    torch.manual_seed(14)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(3):
        loss = model(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results.put((lr, loss.item(), digest(model)))


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=trial, args=(lr, results)) for lr in (0.01, 0.1)]
    for process in processes:
        process.start()
    found = sorted(results.get() for _ in processes)
    for process in processes:
        process.join()
    for lr, loss, weights in found:
        print(f"lr {lr} loss {loss:.9g} weights {weights}")
    print("exit codes", [process.exitcode for process in processes])
