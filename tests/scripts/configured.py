"""Settings are globals, and a configuration file is a script that overwrites them."""

import pathlib
import sys

import torch
from torch import nn
from weights import digest

width = 4
learning_rate = 1e-3
max_iters = 5
activation = nn.ReLU()
for argument in sys.argv[1:]:
    if argument.startswith("--"):
        key, _, value = argument[2:].partition("=")
        assert key in globals(), f"unknown setting {key}"
        globals()[key] = type(globals()[key])(value)
    else:
        exec((pathlib.Path(__file__).parent / argument).read_text())
settings = {k: v for k, v in globals().items() if isinstance(v, (int, float)) and k[0] != "_"}
print("settings", settings)

torch.manual_seed(10)
model = nn.Sequential(nn.Linear(3, width), activation, nn.Linear(width, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
for iteration in range(max_iters):
    x = torch.randn(8, 3)
    loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iter {iteration} loss {loss.item():.9g}")
print("weights", digest(model))
