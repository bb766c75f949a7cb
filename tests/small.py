"""What many tests begin with: rules as a file, a small model, and an optimizer that moves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def rule_file(*rules: Mapping[str, Any], **common: Any) -> dict[str, Any]:
    """Return rules as a file has them.

    Args:
        rules: each gets a number as its id, unless it has one.
        common: what all of them have, unless they say otherwise.
    """
    numbered = [{"id": f"r{number}", **common, **rule} for number, rule in enumerate(rules)]
    return {"version": 1, "rules": numbered}


def net() -> Any:
    """Return two layers, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters."""
    return [param.detach().clone() for param in model.parameters()]
