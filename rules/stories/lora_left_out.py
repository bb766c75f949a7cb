"""Fine-tunes a small classifier by LoRA; the optimizer was made before the adapters.

gradsurgeon run rules/stories/lora_left_out.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return out


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # here the adapters do not exist yet
for place in (0, 2):
    layer = model[place]
    assert isinstance(layer, nn.Linear)  # noqa: S101 # so it was built above
    model[place] = Adapted(layer)
for _ in range(60):
    inputs = torch.randn(32, 16)
    loss = functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}")  # noqa: T201 # a script prints; the head alone has learnt
