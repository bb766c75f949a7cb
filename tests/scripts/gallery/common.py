"""What the trainings of the gallery share: a mark, a small model, a batch and a loop.

A training is a function that trains, and returns the modules that it has trained.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

STEPS = 24


def training(*ranks, healthy=True):
    """Mark a training: the test runs it on each of these numbers of ranks, or in one process if there is none.

    If it is ``healthy``, no check may find anything in it.
    """
    return lambda function: function


def mlp(width=16):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def sow():
    """Let each rank draw batches of its own from now on."""
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))


def loss_of(model, rows=8):
    x = torch.randn(rows, 8)
    return (model(x) - x[:, :4]).square().mean()


def train(model, optimizer=None, loss_of=loss_of, steps=STEPS, before_update=lambda: None):
    """Train, with AdamW unless another optimizer is given, and return the model."""
    if optimizer is None:
        optimizer = AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        before_update()
        optimizer.step()
        tell(loss)
    return model


def train_by_sgd(model, lr=0.1, **more):
    return train(model, SGD(model.parameters(), lr), **more)


def tell(loss):
    print(f"loss {float(loss.detach()):.9g}")
