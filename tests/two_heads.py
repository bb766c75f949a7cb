"""A model whose heads take one tensor, and what these send back to it, taken by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ranks import Json
from torch import Tensor, nn

import gradsurgeon

HEADS = ["seg_head", "depth_head"]
CONFLICT = {"action": "conflict"}
PCGRAD = {"action": "combine", "method": "pcgrad"}
MGDA = {"action": "combine", "method": "mgda"}


class TwoHeads(nn.Module):
    """Two heads take what a trunk gives them, which is kept to look at."""

    features: Tensor

    def __init__(
        self, seg: nn.Module | None = None, depth: nn.Module | None = None, width: int = 16
    ) -> None:
        super().__init__()
        self.trunk: Any = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.seg_head: Any = seg or nn.Linear(width, 3)
        self.depth_head: Any = depth or nn.Linear(width, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        self.features = self.trunk(x)
        return [self.seg_head(self.features), self.depth_head(self.features)]


class ManyHeads(nn.Module):
    """Heads of one class and in any number."""

    features: Tensor

    def __init__(self, heads: int, width: int = 8) -> None:
        super().__init__()
        self.trunk: Any = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.heads: Any = nn.ModuleList(nn.Linear(width, 2) for _ in range(heads))

    def forward(self, x: Tensor) -> list[Tensor]:
        self.features = self.trunk(x)
        return [head(self.features) for head in self.heads]


def losses(outs: Sequence[Tensor]) -> list[Tensor]:
    """Return a loss of each output; the first one is pushed the other way than the rest."""
    first, *others = outs
    return [first.sum() * 0.1, *((-out).exp().mean() * (k + 1) for k, out in enumerate(others))]


def loss(outs: Sequence[Tensor]) -> Tensor:
    return total(losses(outs))


def total(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    for one in others:
        first = first + one
    return first


def opposed(model: Any) -> None:
    """Let both heads look the same way, so that their losses conflict."""
    with torch.no_grad():
        model.depth_head.weight.copy_(model.seg_head.weight[: len(model.depth_head.weight)])


def jacobian(parts: Sequence[Tensor], features: Tensor) -> Tensor:
    """Return what each loss sends back to a tensor, ``[losses, elements]``."""
    rows = [torch.autograd.grad(part, features, retain_graph=True)[0] for part in parts]
    return torch.stack([row.flatten() for row in rows])


def rules(*given: Json) -> Json:
    common = {"modules": HEADS, "tensor": "input.grad"}
    return {"version": 1, "rules": [{"id": rule["action"], **common, **rule} for rule in given]}


def applied(model: nn.Module, *given: Json, **options: Any) -> gradsurgeon.Session:
    return gradsurgeon.apply(model, rules(*given), **options)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Tell whether gradients are the same to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[n], right[n], rtol=1e-9, atol=1e-12) for n in left
    )


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, 0))


def by_hand(model: Any, parts: Sequence[Tensor], aggregator: Any) -> dict[str, Tensor]:
    """Return the gradients that come of what an aggregator makes of those of the features."""
    wanted = aggregator(jacobian(parts, model.features)).view_as(model.features)
    named = dict(model.named_parameters())
    trunk = {name: param for name, param in named.items() if name.startswith("trunk.")}
    heads = {name: param for name, param in named.items() if name not in trunk}
    plain = torch.autograd.grad(total(parts), list(heads.values()), retain_graph=True)
    moved = torch.autograd.grad(model.features, list(trunk.values()), wanted, retain_graph=True)
    return dict(zip(trunk, moved, strict=True)) | dict(zip(heads, plain, strict=True))
