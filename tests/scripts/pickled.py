"""Reads numbers from standard input; pickles objects of classes that `__main__` defines."""

import pickle
import sys
from dataclasses import dataclass

import __main__
import torch
from torch import nn
from weights import digest


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return (self.slope * batch.x + self.offset - batch.y).square().mean()


numbers = torch.tensor([[float(word) for word in line.split()] for line in sys.stdin])
batch = pickle.loads(pickle.dumps(Batch(numbers[:, 0], numbers[:, 1])))
assert type(batch) is Batch
assert __main__.Batch is Batch
model = Line()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
for step in range(4):
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
    # Models are pickled in the middle of training too, and the copy trains on without us.
    copy = pickle.loads(pickle.dumps(model))
    copy(batch).backward()
print("main", __name__, __main__.__file__, Batch.__module__, sys.argv)
print("weights", digest(model))
