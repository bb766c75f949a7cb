"""A sweep: one process per learning rate, none of which knows of the others."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from weights import digest


def trial(lr):
    torch.set_num_threads(1)
    torch.manual_seed(14)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(3):
        loss = model(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), digest(model)


if __name__ == "__main__":
    rates = [0.01, 0.1]
    context = multiprocessing.get_context("spawn")
    # A process takes one trial: with fewer tasks than processes one would do all the work.
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        for rate, (loss, weights) in zip(rates, pool.map(trial, rates)):
            print(f"lr {rate} loss {loss:.9g} weights {weights}")
