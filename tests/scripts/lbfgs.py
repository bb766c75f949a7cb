"""The optimizer calls the model: everything happens in a closure."""

import torch
from torch import nn
from weights import digest

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(20, 2)
y = (x[:, :1] * x[:, 1:]).sin()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
evaluations = 0


def closure():
    global evaluations
    evaluations += 1
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for step in range(5):
    loss = optimizer.step(closure)
    print(f"step {step} loss {loss.item():.9g} evaluations {evaluations}")
print("weights", digest(model))
