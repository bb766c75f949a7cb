"""Which modules add to a difference, if a module inside enlarges what the module around it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small import sgd
from torch import Tensor, nn

import gradsurgeon


class Shifted(nn.Module):
    """Adds a little to its input; the layer norm inside takes away what is large and common."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift, self.norm = shift, nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x + self.shift * (torch.arange(8) % 2))


def record(path: Path, shift: float) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Shifted(shift), nn.Linear(8, 8))
    optimizer = sgd(model)
    with torch.no_grad():
        model[0].bias.add_(1000)  # type: ignore[operator]
    with gradsurgeon.apply(model, "gradsurgeon:fingerprint@1", optimizer=optimizer, record=path):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return path


def test_the_module_that_begins_the_difference_is_told(tmp_path: Path) -> None:
    found = gradsurgeon.compare(record(tmp_path / "b", 0.3), record(tmp_path / "a", 0.0))
    assert found.inside == "1"
    modules = {module.name: module for module in found.modules}
    # The layer norm makes the difference more than ten times as large, and did not begin it.
    assert list(modules) == ["1", "1.norm"]
    assert (modules["1"].came_in, modules["1.norm"].came_in > 0) == (0, True)
