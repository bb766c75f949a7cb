"""Changes to a directory of its own, writes a checkpoint there and resumes from it."""

import os
import tempfile

import torch
from torch import nn
from weights import digest


def build():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9g}")


torch.manual_seed(11)
start = os.getcwd()
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    first, optimizer = build()
    train(first, optimizer, range(3))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    saved = digest(first)
    del first, optimizer
    model, optimizer = build()
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print("resumed from", os.listdir(), saved == digest(model))
    train(model, optimizer, range(3, 5))
    os.chdir(start)
print("weights", digest(model))
