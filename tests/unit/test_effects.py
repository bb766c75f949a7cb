"""The rules of a session become effects: which act on a parameter, and in which order."""

from __future__ import annotations

from typing import Any

from torch import nn

import gradsurgeon
from gradsurgeon.runtime.effects import Effects, by_parameter

PARAMS = ("a.weight", "a.bias", "b.weight", "b.bias")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)


def effects_of(*rules: dict[str, Any]) -> tuple[Effects, gradsurgeon.Plan]:
    document = {"version": 1, "rules": [{"params": "*", "at": "step", **one} for one in rules]}
    model = Net()
    session = gradsurgeon.apply(model, document, optimizer=[])
    try:
        return session._attachment.controller.effects, session.plan
    finally:
        session.remove()


def halve(name: str, params: str = "*", **options: Any) -> dict[str, Any]:
    return {"id": name, "action": "scale", "params": params, "factor": 0.5, **options}


def bound(name: str, high: float, params: str = "*", **options: Any) -> dict[str, Any]:
    return {"id": name, "action": "clamp", "params": params, "max": high, **options}


def test_the_rules_at_the_step_keep_file_order_for_every_tensor() -> None:
    rules = [halve("h1", "a.*"), bound("low", 1.0, "*.bias"), halve("h2"), halve("h3", "*.weight")]
    effects, plan = effects_of(*rules)
    by_index = by_parameter(effects.on_params("step"))
    for index, name in enumerate(PARAMS):
        assert tuple(effect.rule.id for effect in by_index[index]) == plan.chains[name]


def test_one_hook_per_tensor_runs_its_rules_in_file_order() -> None:
    at = {"at": "backward"}
    effects, _ = effects_of(
        halve("h1", **at),
        halve("h2", "*.weight", **at),
        {"id": "off", "action": "zero", "params": "b.bias", **at},
        bound("low", 1.0, "a.*"),
    )
    hooks = {
        PARAMS[index]: [effect.rule.id for effect in own]
        for index, own in by_parameter(effects.on_params("backward")).items()
    }
    assert hooks == {
        "a.weight": ["h1", "h2"],
        "a.bias": ["h1"],
        "b.weight": ["h1", "h2"],
        "b.bias": ["h1", "off"],
    }
