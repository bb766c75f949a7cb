"""A golden run: `python tests/golden.py` records it anew, for a change that is meant to change the numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradsurgeon

GOLDEN = Path(__file__).parent / "cases" / "golden"
PACK = "gradsurgeon:fingerprint@1"
STEPS = 2


class Net(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)
        self.power = power

    def forward(self, words: torch.Tensor) -> Any:
        x = self.norm(self.embed(words))
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 16**self.power
        return self.head(scores.softmax(-1) @ x)


def record(path: Path, rules: Any = PACK, power: float = 0.5) -> Path:
    """Train for a few steps, and record fingerprints."""
    torch.manual_seed(0)
    model = Net(power)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with gradsurgeon.apply(model, rules, optimizer=optimizer, record=path):
        for step in range(STEPS):
            words = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            logits = model(words[:, :-1])
            loss: Any = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
    return path


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    record(GOLDEN)
    (GOLDEN / "state-0.pt").unlink()
