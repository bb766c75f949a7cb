"""The table of the guide of what people write today, and a script that either side of it can act on."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from commands import ROOT
from models import data, same
from ranks import Json
from small import weights_of
from torch import Tensor, nn

import gradsurgeon


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    code: str
    rules: str
    same: str
    remark: str


def table() -> list[Row]:
    guide = (ROOT / "rules" / "guide" / "hooks.md").read_text(encoding="utf-8")
    lines = guide.partition("| today |")[2].strip().splitlines()[2:]
    return [_row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]


def _row(code: str, rules: str, same: str, remark: str = "") -> Row:
    spans = re.findall("`([^`]+)`", rules)
    document = "version: 1\nrules:\n" + "".join(f"  - {one}\n" for one in spans)
    return Row("\n".join(re.findall("`([^`]+)`", code)), document, same, remark)


TABLE = table()


def row(piece: str) -> Row:
    (found,) = [one for one in TABLE if piece in one.code]
    return found


class Net(nn.Module):
    """Two layers, and between them what puts elements that are not finite into the gradient, if told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)
        self.fault: float | None = None

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        if self.fault is not None and hidden.requires_grad:
            hidden.register_hook(self._spoil)  # type: ignore[no-untyped-call]
        return self.head(hidden)

    def _spoil(self, grad: Tensor) -> Tensor:
        assert self.fault is not None
        grad = grad.clone()
        grad[:, 0] = self.fault
        return grad


@dataclass
class Loop:
    """A script: four updates, of gradients that are longer than what bounds them."""

    code: str = ""
    place: str = ""
    passes: int = 1
    fault: float | None = None
    scaler: torch.amp.GradScaler | None = None
    names: Json = field(default_factory=dict)
    grads: list[Tensor | None] = field(default_factory=list)

    def run(self, rules: str | None = None) -> list[Tensor]:
        """Return the weights at the end; `grads` are those that the last update was given."""
        model = Net()
        self.names |= {"torch": torch, "model": model, "scaler": self.scaler}
        if self.place == "each parameter":
            for name, p in model.named_parameters():
                exec(self.code, {**self.names, "p": p, "name": name})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
        self.names["optimizer"] = optimizer
        attached: Any = contextlib.nullcontext()
        if rules is not None:
            attached = gradsurgeon.apply(model, rules)
        with attached:
            for step in range(4):
                self._step(model, optimizer, step)
        return weights_of(model)

    def _step(self, model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        model.fault = self.fault if step == 1 else None
        optimizer.zero_grad()
        self._do("before forward", step)
        for number in range(self.passes):
            loss = (model(data(step * 7 + number, 5, 4)) - 1).square().mean() * 30
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._do("after backward", step)
        handle = optimizer.register_step_pre_hook(lambda *_: self._keep(model))
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        handle.remove()

    def _do(self, place: str, step: int) -> None:
        if self.place == place:
            exec(self.code, {**self.names, "step": step})

    def _keep(self, model: nn.Module) -> None:
        self.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    def largest(self) -> float:
        return max(grad.abs().max().item() for grad in self.grads if grad is not None)


def agree(kind: str, left: list[Tensor], right: list[Tensor]) -> bool:
    """Tell whether two lists are the same, as the column of the table means it."""
    if kind == "bits":
        return same(left, right)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(left, right, strict=True))
