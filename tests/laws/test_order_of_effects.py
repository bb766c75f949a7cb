"""P3: by point first, within a point in file order; the plan prints what happens."""

from __future__ import annotations

import torch
from small import rule_file, sgd, take_step
from torch import nn

import gradsurgeon


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


RULES = {
    "double": {"action": "scale", "factor": 2.0, "at": "backward"},
    "bound": {"action": "clamp", "max": 3.0, "at": "backward"},
    "last-double": {"action": "scale", "factor": 2.0, "at": "step"},
    "last-bound": {"action": "clamp", "max": 3.0, "at": "step"},
}


def test_the_plan_shows_the_order_of_effects() -> None:
    rules = rule_file(*[{"id": i, "params": "*", **RULES[i]} for i in ("last-bound", "double")])
    plan = gradsurgeon.plan(One(), rules)
    assert "double (at backward) -> last-bound (at step)" in str(plan)


def test_hooks_of_the_script_act_in_the_order_in_which_they_came() -> None:
    model = One()
    optimizer = sgd(model, 1.0)
    seen: list[tuple[str, float]] = []

    def note(word: str) -> None:
        assert model.weight.grad is not None
        seen.append((word, model.weight.grad.item()))

    optimizer.register_step_pre_hook(lambda *_: note("step, before"))
    model.weight.register_hook(lambda grad: seen.append(("backward, before", grad.item())))
    rules = rule_file(*[{"id": i, "params": "*", **RULES[i]} for i in ("double", "last-double")])
    with gradsurgeon.apply(model, rules):
        model.weight.register_hook(lambda grad: seen.append(("backward, after", grad.item())))
        for step in range(2):
            if step == 1:
                optimizer.register_step_pre_hook(lambda *_: note("step, after"))
            take_step(optimizer, model.weight.sum())
    first = [("backward, before", 1.0), ("backward, after", 2.0), ("step, before", 2.0)]
    assert seen == [*first, *first, ("step, after", 4.0)]
