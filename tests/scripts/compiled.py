"""A compiled model, with a backend that needs no compiler."""

import torch
from torch import nn
from weights import digest

torch.manual_seed(16)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(6, 4)
    loss = (compiled(x) - x[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
print("weights", digest(model))
