"""A neural ODE: the adjoint method runs the module again, and `torch.autograd.grad`, inside backward."""

import torch
from torch import nn
from weights import digest

torch.manual_seed(7)
STEPS, SIZE = 8, 0.1


class Field(nn.Module):
    """What the state changes by at a time."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))

    def forward(self, t, y):
        return self.net(torch.cat([y, t.expand(len(y), 1)], dim=1))


class Adjoint(torch.autograd.Function):
    """Euler steps whose gradient is had by going the same way back, without keeping the way."""

    @staticmethod
    def forward(ctx, field, start, *params):
        ctx.field = field
        y = start
        with torch.no_grad():
            for step in range(STEPS):
                y = y + SIZE * field(torch.tensor(step * SIZE), y)
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, *params = ctx.saved_tensors
        totals = [torch.zeros_like(param) for param in params]
        for step in reversed(range(STEPS)):
            with torch.enable_grad():
                y = y.detach().requires_grad_(True)
                change = SIZE * ctx.field(torch.tensor(step * SIZE), y)
                back, *found = torch.autograd.grad(change, (y, *params), grad, allow_unused=True)
            grad = grad + back
            totals = [a if b is None else a + b for a, b in zip(totals, found)]
            y = y - change
        return (None, grad, *totals)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 2)
        self.field = Field()
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.head(Adjoint.apply(self.field, self.encoder(x), *self.field.parameters()))


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x, wanted = torch.randn(16, 4), torch.randn(16, 1)
for step in range(4):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), wanted)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")

print("weights", digest(model))
