"""What the tests of `spike-trap` share: rules, the series of losses, and what a session has learnt."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from running_bounds import ByHand
from small import tanh_net
from torch import Tensor, nn

from gradsurgeon import Session
from gradsurgeon.runtime.running_norms import RunningStatistic
from gradsurgeon.runtime.spike_effect import SpikeEffect

# What the loss of each step is multiplied by.
FACTORS = (1, 1.2, 0.9, 1.1, 1, 30, 1, 1.1, 0.9, 50, 0.8, 1.3, 1, 7, 1)
ABOVE: dict[str, Json] = {
    "sigmas": {"sigmas": 2.5, "beta": 0.9, "warmup": 4},
    "times": {"times": 1.05, "beta": 0.9, "warmup": 4},
}
PER = ("rule", "parameter")
# Each pair of options once.
RULES = [
    ("sigmas", "rule", "clip"),
    ("times", "parameter", "clip"),
    ("sigmas", "parameter", "skip-step"),
    ("times", "rule", "skip-step"),
]


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return tanh_net(4, 6, 2)


def backward(model: Any, step: int, parts: int = 1) -> None:
    model.zero_grad()
    for part in data(step, 8, 4).chunk(parts):
        (model(part).square().mean() * FACTORS[step] / parts).backward()


def spike_trap(above: str, per: str, then: str, **options: Any) -> Json:
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "above": ABOVE[above]}
    patience = {"give_up_after": 99} if then == "skip-step" else {}
    return {**rule, "per": per, "then": then, **patience, **options}


def rules(*given: Json) -> Json:
    return {"version": 1, "rules": list(given)}


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def learnt(session: Session) -> dict[str, list[float]]:
    """Return what is kept of each norm, the number of updates and their mean first, by name."""
    names = [param.name for param in session.plan.manifest.params]
    found = {}
    for statistic in statistics_of(session):
        over_all = statistic.kept.shape[1] == 1 < len(statistic.indices)
        for column, index in enumerate(statistic.indices[:1] if over_all else statistic.indices):
            found["" if over_all else names[index]] = statistic.kept[:, column].tolist()
    return found


def statistics_of(session: Session) -> list[RunningStatistic]:
    """Return what the rules of a session keep, each once."""
    traps = session._attachment.controller.effects.traps
    spikes = [trap for trap in traps if isinstance(trap, SpikeEffect)]
    return [one for trap in spikes for one in dict.fromkeys(trap.statistics.values())]


def same_as(hand: ByHand, session: Session, rel: float = 1e-5) -> None:
    """Compare what was learnt: how many updates have entered, and their mean."""
    found = learnt(session)
    wanted = {name: bound for name, bound in hand.bounds.items() if bound.number}
    assert {name: kept[0] for name, kept in found.items() if kept[0]} == {
        name: bound.number for name, bound in wanted.items()
    }
    for name, bound in wanted.items():
        assert found[name][1] == pytest.approx(bound.mean, rel=rel)


def assert_same(
    left: Iterable[Tensor], right: Iterable[Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    for one, other in zip(left, right, strict=True):
        pair = one.detach(), other.detach()
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol, equal_nan=True)


def rebuilt(state: Any) -> Any:
    """Return a state as a checkpoint brings it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
