"""The two models that faults are put into: a small transformer and a small residual network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention, written out, with what a refactoring gets wrong as attributes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale, self.ahead = heads, (width // heads) ** -0.5, 0
        self.flipped = self.fused = self.joined = False
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        layers = (self.q, self.k, self.v)
        if self.joined:
            weights = torch.cat([one.weight for one in layers])
            biases = torch.cat([one.bias for one in layers])
            projected: Any = functional.linear(x, weights, biases).chunk(3, -1)
        else:
            projected = [one(x) for one in layers]
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in projected)
        if self.flipped:
            k = k.flip(1)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1 + self.ahead).bool()
            scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(hidden, -1e9)
            y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rounded = self.detached = False
        self.fc, self.act, self.out = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        x = self.fc(x)
        x = self.act(x.bfloat16().float() if self.rounded else x)
        return self.drop(self.out(x.detach() if self.detached else x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    """Three blocks over 97 tokens; the head is tied to the embedding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.shift = 0
        self.emb, self.pos = nn.Embedding(97, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(Block(width, 4) for _ in range(3))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 97, bias=False)
        with torch.no_grad():
            self.emb.weight.mul_(0.1)
            self.pos.weight.mul_(0.1)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Any:
        y = self.emb(x) + self.pos(torch.arange(x.shape[1]) + self.shift)
        for block in self.h:
            y = block(y)
        return self.head(self.ln(y))


class Residual(nn.Module):
    """Two convolutions and one activation that is called twice, as in torchvision's ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kept = 1.0
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.kept * x)


class Convolutions(nn.Module):
    """A stem, three residual blocks and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(3))
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.bn(self.stem(x))
        for block in self.blocks:
            x = self.pool(block(x))
        return self.head(x.mean((2, 3)))
