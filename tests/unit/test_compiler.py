"""A plan becomes a program: what each hook does, in which order."""

from __future__ import annotations

from typing import Any

import gradsurgeon
from gradsurgeon.language.compiler import compile_plan
from gradsurgeon.language.planning import Manifest
from gradsurgeon.language.planning.manifest import Param

PARAMS = ("a.weight", "a.bias", "b.weight", "b.bias")


def plan_of(*rules: dict[str, Any]) -> gradsurgeon.Plan:
    params = [Param(name, (), (2, 2), "float32", True, ("Linear",)) for name in PARAMS]
    document = {"version": 1, "rules": [{"params": "*", "at": "step", **one} for one in rules]}
    return gradsurgeon.plan(Manifest("Net", tuple(params)), document)


def halve(name: str, params: str = "*", **options: Any) -> dict[str, Any]:
    return {"id": name, "action": "scale", "params": params, "factor": 0.5, **options}


def bound(name: str, high: float, params: str = "*", **options: Any) -> dict[str, Any]:
    return {"id": name, "action": "clamp", "params": params, "max": high, **options}


def test_the_rules_at_the_step_keep_file_order_for_every_tensor() -> None:
    rules = [halve("h1", "a.*"), bound("low", 1.0, "*.bias"), halve("h2"), halve("h3", "*.weight")]
    plan = plan_of(*rules)
    program = compile_plan(plan)
    for index, name in enumerate(PARAMS):
        ids = [stage.rule.id for stage in program.at_step if index in stage.indices]
        assert tuple(ids) == plan.chains[name]


def test_one_hook_per_tensor_runs_its_rules_in_file_order() -> None:
    at = {"at": "backward"}
    rules = [
        halve("h1", **at),
        halve("h2", "*.weight", **at),
        {"id": "off", "action": "zero", "params": "b.bias", **at},
        bound("low", 1.0, "a.*"),
    ]
    program = compile_plan(plan_of(*rules))
    hooks = {PARAMS[index]: [one.id for one in own] for index, own in program.per_tensor.items()}
    assert hooks == {
        "a.weight": ["h1", "h2"],
        "a.bias": ["h1"],
        "b.weight": ["h1", "h2"],
        "b.bias": ["h1", "off"],
    }
