"""An optimizer of the script's own, frozen layers, and training in a thread."""

import threading

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from weights import digest


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(moment * first + p.grad * (1 - first)), alpha=-group["lr"])
                moment.mul_(second).add_(p.grad, alpha=1 - second)
        return loss


torch.manual_seed(20)
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
model[0].requires_grad_(False)
optimizer = Lion((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1)


def train():
    for step in range(5):
        x = torch.randn(7, 4)
        optimizer.zero_grad()
        loss = (model(x) - x.mean(1, keepdim=True)).abs().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9g}")


thread = threading.Thread(target=train)
thread.start()
thread.join()
print("weights", digest(model))
