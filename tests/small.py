"""What many tests begin with: rules as a file, a small model, and an optimizer that moves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import Json
from torch import Tensor, nn

import gradsurgeon


def rules_of_workers(section: str) -> Any:
    """Return a section of the rules that workers train under."""
    table = Path(__file__).parent / "cases" / "rules_of_workers.yaml"
    return yaml.safe_load(table.read_text(encoding="utf-8"))[section]


def rule_file(*rules: Mapping[str, Any], **common: Any) -> Json:
    """Return rules as a file has them.

    Args:
        rules: each gets a number as its id, unless it has one.
        common: what all of them have, unless they say otherwise.
    """
    numbered = [{"id": f"r{number}", **common, **rule} for number, rule in enumerate(rules)]
    return {"version": 1, "rules": numbered}


def attach(model: nn.Module, *rules: Mapping[str, Any], **options: Any) -> gradsurgeon.Session:
    """Apply rules that a test has made, as a file has them."""
    return gradsurgeon.apply(model, rule_file(*rules), **options)


def net() -> Any:
    """Return two layers, with the same weights each time."""
    torch.manual_seed(0)
    return tanh_net(4, 6, 2)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters."""
    return [param.detach().clone() for param in model.parameters()]


def equal(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether as many tensors are the same in each element."""
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def edited(
    rule: Mapping[str, Any], shape: tuple[int, ...], factor: float, updates: int = 1
) -> list[Tensor]:
    """Return the gradients that an optimizer gets under one rule, where each element of the script's is a factor."""
    model: Any = nn.Module()
    model.w = nn.Parameter(torch.zeros(shape))
    optimizer = sgd(model, 0.0)
    found = []
    with gradsurgeon.apply(model, rule_file(rule, params="*"), optimizer=optimizer):
        for _ in range(updates):
            optimizer.zero_grad()
            (model.w * factor).sum().backward()
            optimizer.step()
            assert model.w.grad is not None
            found.append(model.w.grad.clone())
    return found


def fired(session: Any) -> dict[str, int]:
    """Return how often each rule has fired."""
    return {rule: status.fired for rule, status in session.status().items()}


def kinds_of(told: Any) -> list[str]:
    """Return the kind of each event of a session or a run."""
    return [event.kind for event in told.events]


def fields_of(told: Any, *names: str, **only: object) -> list[Any]:
    """Return one field of each event, or several as a tuple, of those events that have the other values."""
    wanted = only.items()
    chosen = [e for e in told.events if all(getattr(e, name) == value for name, value in wanted)]
    return [*map(attrgetter(*names), chosen)]


def events_of(told: Any, kind: str) -> list[gradsurgeon.Event]:
    return [event for event in told.events if event.kind == kind]


def messages(told: Any, kind: str) -> list[str]:
    return [event.message for event in events_of(told, kind)]


def steps_of(session: Any, name: str, *more: str, **rule: str) -> list[int]:
    """Return the steps that the records of a tensor have."""
    return [step for step, _ in session.history(name, *more, **rule)]


def tanh_net(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return two layers with a tanh between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, out))


def relu_net(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return the same with rectified units."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


def linears(*widths: int) -> nn.Sequential:
    """Return layers one after the other, from width to width."""
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


def take_step(optimizer: torch.optim.Optimizer, loss: Any) -> None:
    """Take a plain step of training."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def refusal(call: Callable[[], object]) -> str:
    """Return the text of the error that a call raises, and nothing if it raises none."""
    try:
        call()
    except gradsurgeon.GradSurgeonError as error:
        return str(error)
    return ""


def hold_rows(found: Any, wanted: Any, rel: float = 1e-4) -> None:
    """Compare records: their steps are the same, and their numbers up to rounding."""
    assert [step for step, _ in found] == [step for step, _ in wanted]
    numbers = [number for _, number in wanted]
    assert [number for _, number in found] == pytest.approx(numbers, rel=rel, nan_ok=True)
