"""P3: by point first, within a point in file order; the plan prints what happens."""

from __future__ import annotations

import pytest
import torch
from small import rule_file, sgd
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


def outcome(ids: list[str]) -> tuple[float, tuple[str, ...]]:
    """Return what a gradient of 2 becomes, and the chain that the plan prints."""
    model = One()
    optimizer = sgd(model, 1.0)
    rules = rule_file(*[{"id": i, "params": "*", **RULES[i]} for i in ids])
    with gradsurgeon.apply(model, rules) as session:
        (model.weight * 2.0).sum().backward()
        optimizer.step()
    return -model.weight.item(), session.plan.chains["weight"]


@pytest.mark.parametrize(
    ("ids", "final", "chain"),
    [
        (["double", "bound"], 3.0, ["double", "bound"]),
        (["bound", "double"], 4.0, ["bound", "double"]),
        (["last-double", "last-bound"], 3.0, ["last-double", "last-bound"]),
        (["last-bound", "last-double"], 4.0, ["last-bound", "last-double"]),
        # The point comes before the place in the file.
        (["last-double", "bound", "double"], 8.0, ["bound", "double", "last-double"]),
        (["last-bound", "double"], 3.0, ["double", "last-bound"]),
    ],
)
def test_effects_follow_point_then_file(ids: list[str], final: float, chain: list[str]) -> None:
    assert outcome(ids) == (final, tuple(chain))


def test_the_plan_shows_the_order_of_effects() -> None:
    rules = rule_file(*[{"id": i, "params": "*", **RULES[i]} for i in ("last-bound", "double")])
    plan = gradsurgeon.plan(One(), rules)
    assert "double (at backward) -> last-bound (at step)" in str(plan)


def test_what_a_log_sees_depends_on_its_point_and_place() -> None:
    model = One()
    optimizer = sgd(model, 1.0)
    log = {"action": "norm-log", "params": "*"}
    rules = rule_file(
        {"id": "raw", **log, "at": "backward"},
        {"id": "double", "params": "*", **RULES["double"]},
        {"id": "doubled", **log, "at": "backward"},
        {"id": "before-last", **log, "at": "step"},
        {"id": "last-double", "params": "*", **RULES["last-double"]},
        {"id": "after-last", **log, "at": "step"},
        {"id": "passed", **log},
    )
    with gradsurgeon.apply(model, rules) as session:
        (model.weight * 1.0).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    seen = {
        rule: round(session.latest("weight", rule=rule), 4)
        for rule in ("raw", "doubled", "passed", "before-last", "after-last")
    }
    assert seen == {
        "raw": 1.0,
        "doubled": 2.0,
        "passed": 2.0,
        "before-last": 0.5,
        "after-last": 1.0,
    }


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
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
    first = [("backward, before", 1.0), ("backward, after", 2.0), ("step, before", 2.0)]
    assert seen == [*first, *first, ("step, after", 4.0)]
