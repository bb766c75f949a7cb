"""Trains for three steps and ends in the way that the first argument names."""

import atexit
import os
import signal
import sys

import torch
from torch import nn
from weights import digest


def fail(value):
    raise ValueError(f"cannot go on with {value}")


def end(how):
    if how == "code":
        atexit.register(print, "last words")
        sys.exit(3)
    if how == "message":
        sys.exit("no more data")
    if how == "exception":
        try:
            fail(how)
        except ValueError as error:
            raise RuntimeError("training failed") from error
    if how == "forward":
        model(torch.zeros(1, 7))
    if how == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "at once":
        os._exit(7)


torch.manual_seed(19)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
print("weights", digest(model), flush=True)
end(sys.argv[1])
