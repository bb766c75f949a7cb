"""Models with several losses, and the gradients of each taken by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import Json
from small import tanh_net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon.actions._methods import METHODS

# Of the methods that must be given some.
OPTIONS: dict[str, Json] = {
    "cagrad": {"c": 0.5},
    "fairgrad": {"alpha": 1.0},
}
# The method whose weights are known without a computation: with `alpha: 0` it averages.
AVERAGE: Json = {"method": "fairgrad", "alpha": 0}

Losses = Callable[[nn.Module, Tensor], dict[str, Tensor]]


class Heads(nn.Module):
    """A trunk under two heads, whose losses conflict."""

    seg: nn.Module
    depth: nn.Module

    def __init__(self, trunk: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.trunk: Any = trunk or tanh_net(6, 16, width)
        self.seg = nn.Linear(width, 3)
        self.depth = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(x)
        return self.seg(features), self.depth(features)


def heads() -> tuple[Heads, Tensor]:
    """Return a model with two heads and a batch."""
    return Heads(), torch.randn(5, 6)


class Overlapping(nn.Module):
    """Three losses that reach parts of the trunk each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.tanh(self.trunk[0](x))
        return low, torch.tanh(self.trunk[1](low)) + self.trunk[2](x)


class TwiceUsed(nn.Module):
    """A trunk that runs twice in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.seg = nn.Linear(6, 3)
        self.depth = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(self.trunk(x))
        return self.seg(features), self.depth(features)


def two(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    seg, depth = model(x)
    # What one pushes down the other one pushes up.
    conflict = seg.square().mean()
    return {"seg": conflict, "depth": 0.5 * (depth - 1).abs().mean() - 2.0 * conflict}


def three(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    low, high = model(x)
    return {
        "low": low.square().mean(),
        "high": 0.1 * (high - 1).square().mean() - 2.0 * low.square().mean(),
        "rest": high.sum(1).square().mean(),
    }


class Checkpointed(nn.Module):
    """A block whose forward pass runs again in the backward pass, and moves buffers when it does."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_(self.reentrant)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.up(x).unsqueeze(1)).squeeze(1)


class Embedding(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=sparse)

    def forward(self, x: Tensor) -> Any:
        return self.table((x[:, 0].abs() * 5).long() % 20)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.act(self.first(x))).add_(1.0)


TRUNKS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": lambda: tanh_net(6, 16, 8),
    "checkpoint": Checkpointed,
    "lstm": Recurrent,
    "transformer": Attending,
    "embedding": Embedding,
    "in-place": InPlace,
}


def rules(*given: Mapping[str, Any]) -> Json:
    """Return a rule file of rules on the losses `seg` and `depth` and on the trunk, unless they say otherwise."""
    common = {"losses": ["seg", "depth"], "params": "trunk.*"}
    return {"version": 1, "rules": [{"id": rule["action"], **common, **rule} for rule in given]}


def applied(model: nn.Module, *given: Mapping[str, Any], **options: Any) -> gradsurgeon.Session:
    return gradsurgeon.apply(model, rules(*given), **options)


def trunk_of(model: nn.Module) -> list[Tensor]:
    return [param for name, param in model.named_parameters() if name.startswith("trunk.")]


def jacobian(losses: Mapping[str, Tensor], params: Sequence[Tensor]) -> Tensor:
    """Return the gradients of single losses, ``[losses, elements]``."""
    rows = []
    for loss in losses.values():
        grads = torch.autograd.grad(
            loss, params, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def flat_grads(params: Sequence[Tensor]) -> Tensor:
    """Return the gradients that parameters have, zeros where there is none."""
    parts: list[Tensor] = []
    for param in params:
        grad: Tensor | None = param.grad
        parts.append((torch.zeros_like(param) if grad is None else grad).flatten())
    return torch.cat(parts)


@contextmanager
def drawing(rule: str = "combine", step: int = 0, call: int = 0) -> Iterator[None]:
    """Draw from torch's generator what a rule draws in a call."""
    state, text = torch.get_rng_state(), f"{torch.initial_seed()}/{rule}/{step}/{call}"
    torch.manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) // 2)
    yield
    torch.set_rng_state(state)


def aggregator(method: str) -> Any:
    """Return TorchJD's own, which sees the whole Jacobian."""
    aggregation = pytest.importorskip("torchjd.aggregation")
    known = METHODS[method].weighting.removesuffix("Weighting")
    return getattr(aggregation, known)(**OPTIONS.get(method, {}))
