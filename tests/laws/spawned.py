"""What the child processes of `test_copies` run: it must not need gradsurgeon."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

SAVED = """
import pickle, sys, warnings
warnings.simplefilter("error")
sys.modules["gradsurgeon"] = None  # importing it fails, as where it is not installed
import torch
from torch import nn
torch.serialization.add_safe_globals([nn.Sequential, nn.Linear, nn.Tanh])
loads = {
    "pt": [lambda file: torch.load(file, weights_only=True), lambda file: torch.load(file, weights_only=False)],
    "pickle": [pickle.load],
}
for path, load in [(path, load) for path in sys.argv[1:] for load in loads[path.rpartition(".")[2]]]:
    with open(path, "rb") as file:
        model = load(file)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert not any(param._backward_hooks for param in model.parameters())
    print([round(param.grad.norm().item(), 5) for param in model.parameters()])
"""


def report(model: nn.Module, queue: Any) -> None:
    """Train a model that came as an argument; say what happened, and what was on it."""
    model(torch.ones(3, 4)).sum().backward()
    grads = [round(_norm(param), 5) for param in model.parameters()]
    hooks = [bool(param._backward_hooks) for param in model.parameters()]
    queue.put((grads, any(hooks), "gradsurgeon" in sys.modules))


def _norm(param: torch.Tensor) -> float:
    assert param.grad is not None
    return float(param.grad.norm())
