"""Attention over padded texts; one text of one batch is empty. Nothing here knows of gradsurgeon.

gradsurgeon run --rules gradsurgeon:nan-trap@1 rules/stories/went_nan.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(padding[:, None], -torch.inf)
        out: Tensor = self.out(scores.softmax(-1) @ v)
        return out


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(50, 32), Attention(32)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(self.embed(tokens), tokens == 0))
        return out


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(200):
    tokens = torch.randint(1, 50, (16, 12))
    if step == 112:
        tokens[3] = 0  # all padding
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}")  # noqa: T201 # nan without rules
