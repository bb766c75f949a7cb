"""A sink that keeps what it is given, or fails as it is told, and a small training that it gets numbers of."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ranks import Json
from small import rule_file, sgd, take_step, tanh_net
from torch import Tensor, nn

import gradsurgeon

STEPS = 30
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}
ONLY_NORMS: Json = rule_file(NORMS)
TRAP = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}


class Kept:
    """Keeps what it is given; does as told at each call of a method."""

    def __init__(self, names: Sequence[str] = (), **does: Any) -> None:
        self.names = tuple(names)
        self._does = does
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.texts: list[tuple[int, str, str]] = []
        self.threads: set[int] = set()
        self.flushed = self.closed = 0

    def _do(self, method: str) -> None:
        self.threads.add(threading.get_ident())
        if (act := self._does.get(method)) is not None:
            act()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._do("scalars")
        for name, value in values.items():
            self.curves.setdefault(name, []).append((step, value))

    def text(self, step: int, name: str, text: str) -> None:
        self._do("text")
        self.texts.append((step, name, text))

    def flush(self) -> None:
        self._do("flush")
        self.flushed += 1

    def close(self) -> None:
        self._do("close")
        self.closed += 1


def fail() -> None:
    raise OSError(28, "No space left on device")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return tanh_net(3, 4, 2)


def train(
    *sinks: Any,
    rules: Sequence[Json] = (NORMS, TRAP),
    bad: int | None = None,
    record: Any = None,
) -> tuple[list[Tensor], gradsurgeon.Session]:
    """Train under rules; return the weights and the session."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with gradsurgeon.apply(
        model, {"version": 1, "rules": list(rules)}, sinks=sinks, record=record
    ) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            factor = math.nan if step == bad else 1.0
            (model(torch.ones(5, 3) * (step + 1)).square().mean() * factor).backward()
            optimizer.step()
    return [param.detach() for param in model.parameters()], session


def frozen(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer that moves nothing."""
    return sgd(model, 0.0)


def step(model: nn.Module, optimizer: torch.optim.SGD, factor: float = 1.0) -> None:
    take_step(optimizer, model(torch.ones(5, 3)).sum() * factor)
