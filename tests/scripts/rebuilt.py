"""Fine-tuning in phases: the head alone, then a new layer joins, then all with a new optimizer."""

import torch
from torch import nn
from weights import digest

torch.manual_seed(15)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)
        self.adapter = None

    def forward(self, x):
        hidden = torch.tanh(self.backbone(x))
        if self.adapter is not None:
            hidden = hidden + self.adapter(hidden)
        return self.head(hidden)


def train(model, optimizer, phase, steps):
    for step in range(steps):
        loss = model(torch.randn(10, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{phase} {step} loss {loss.item():.9g}")


model = Net()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
train(model, optimizer, "head", 2)
model.adapter = nn.Linear(8, 8)
optimizer.add_param_group({"params": model.adapter.parameters(), "lr": 0.05})
train(model, optimizer, "adapter", 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train(model, optimizer, "all", 3)
print("weights", digest(model))
