"""The architectures of the workloads, in plain torch."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention as in GPT-2: one projection to queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        # shape of each: [batch, heads, tokens, width / heads]
        parts = self.c_attn(hidden).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast("Tensor", self.c_proj(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + cast("Tensor", self.mlp(self.ln_2(hidden)))


class Gpt2(nn.Module):
    """The smallest GPT-2: 12 layers of width 768, the head tied to the embedding."""

    VOCABULARY: ClassVar[int] = 50_257

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(self.VOCABULARY, width), nn.Embedding(1024, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            hidden = block(hidden)
        return cast("Tensor", self.head(self.ln_f(hidden)))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, inputs, h, w]`` to ``[batch, 4 * width, h / stride, w / stride]``."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = functional.relu(self.bn2(self.conv2(hidden)))
        return functional.relu(self.bn3(self.conv3(hidden)) + self.downsample(images))


class ResNet50(nn.Module):
    """The usual 50 layers: stages of 3, 4, 6 and 3 bottlenecks."""

    STAGES: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, depth in enumerate(self.STAGES):
            width = 64 * 2**stage
            for number in range(depth):
                stride = 2 if number == 0 and stage > 0 else 1
                blocks.append(Bottleneck(inputs, width, stride))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 3, h, w]`` to logits ``[batch, classes]``."""
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return cast("Tensor", self.fc(features))


class DeepMlp(nn.Module):
    """Linear layers with tanh between them, as many as wanted."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[batch, width]`` to the same shape."""
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return features
