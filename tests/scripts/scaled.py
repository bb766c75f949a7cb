"""Mixed precision with a gradient scaler that meets an overflow and skips that step."""

import torch
from torch import nn
from weights import digest

torch.manual_seed(17)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
for step in range(6):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x) - 1.0).square().mean()
    if step == 3:
        loss = loss * torch.inf
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.9g} scale {scaler.get_scale():g}")
print("weights", digest(model))
