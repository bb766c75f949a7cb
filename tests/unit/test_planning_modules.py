"""Rules on modules and tags in the plan, and rules for one of several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Json
from torch import nn

import gradsurgeon
from gradsurgeon import BindError
from gradsurgeon.language.planning import Plan


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
        self.head = nn.Linear(3, 1)
        self.again = self.head


def bind(*rules: Json, model: nn.Module | None = None) -> Plan:
    return gradsurgeon.plan(model or Generator(), {"version": 1, "rules": list(rules)})


def rule(**options: Any) -> Json:
    return {"id": "it", "action": "scale", "factor": 2.0, "tensor": "output", **options}


def names(plan: Plan) -> list[str]:
    return [binding.name for binding in plan.of("it")]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"modules": "*"}, ["body", "body.0", "body.1", "head"]),
        ({"modules": "."}, ["."]),
        ({"modules": [".", "head"]}, [".", "head"]),
        ({"modules": "again"}, ["head"]),
        ({"modules": "*", "exclude": "again"}, ["body", "body.0", "body.1"]),
        ({"modules": "*", "where": {"module_type": "Linear"}}, ["body.0", "head"]),
        ({"modules": "re:body\\.\\d"}, ["body.0", "body.1"]),
    ],
)
def test_which_modules_are_bound(options: Json, found: list[str]) -> None:
    assert names(bind(rule(**options))) == found


def test_modules_of_wrappers_have_the_names_they_had() -> None:
    wrapped = nn.DataParallel(torch.compile(Generator(), backend="eager"))  # type: ignore[type-var]
    assert names(bind(rule(modules="*"), model=wrapped)) == ["body", "body.0", "body.1", "head"]
    assert bind(rule(modules="*"), model=wrapped).manifest.origin == "Generator"


@pytest.mark.parametrize(
    ("tensor", "point", "hook"),
    [
        ("output", "forward", "forward hook"),
        ("output[0].logits", "forward", "forward hook"),
        ("input.mask", "forward", "forward pre-hook"),
        ("output.grad", "backward", "hook on the output"),
        ("output[1].grad", "backward", "hook on the output"),
        ("input.grad", "backward", "view of the input"),
    ],
)
def test_what_carries_a_rule_to_a_tensor(tensor: str, point: str, hook: str) -> None:
    (binding,) = bind(rule(modules="head", tensor=tensor)).of("it")
    assert (binding.tensor, binding.point, binding.hook) == (tensor, point, hook)
    assert binding.aliases == ("again",)


def test_no_module_matches() -> None:
    with pytest.raises(
        BindError, match=r'rule it: no module of the model matches "haed"; did you mean "head"'
    ):
        bind(rule(modules="haed"))


def test_tags_bind_when_the_script_uses_them() -> None:
    plan = bind({"id": "it", "action": "zero", "tensors": ["hidden*", "y"]})
    assert [(b.name, b.tensor, b.hook) for b in plan.of("it")] == [
        ("hidden*", "grad", "tag"),
        ("y", "grad", "tag"),
    ]
    assert (
        plan.rule_warnings["it"][-1]
        == "takes effect when the script tags a tensor with such a name"
    )


def test_what_a_reader_must_know_of_module_rules() -> None:
    plan = bind(
        rule(id="values", modules="head"),
        rule(id="training", modules="head", when="train"),
        rule(id="share", modules="body.1", tensor="input.grad"),
    )
    assert plan.rule_warnings["values"] == (
        "acts in every forward call, also in evaluation; `when: train` limits it to training",
    )
    assert plan.rule_warnings["training"] == ()
    assert plan.rule_warnings["share"] == (
        "the view that separates this module's share can regroup a sum in its last bit",
    )
    assert plan.warnings == (
        "under torch.compile no call of gradsurgeon.tag(), of a module with rules, or around one, is part of "
        "a graph: numerics may differ",
    )


def test_the_table_and_the_json_form() -> None:
    plan = bind(
        rule(modules="*", tensor="output.grad"),
        {"id": "norms", "action": "norm-log", "params": "*.weight"},
        {"id": "y", "action": "capture", "tensors": "y"},
    )
    assert str(plan).splitlines()[2:6] == [
        "  rule   action    at           hook                       binds  elements  steps",
        "  it     scale     backward     hook on the output     4 modules         -  all",
        "  norms  norm-log  accumulated  end of backward     2 parameters         9  all",
        "  y      capture   backward     tag                        1 tag         -  all",
    ]
    assert "4 tensors: body output.grad, body.{0..1} output.grad, head output.grad" in str(plan)
    found = plan.to_dict()
    assert found["rules"][0]["modules"] == ["body", "body.0", "body.1", "head"]
    assert found["rules"][0]["params"] == found["rules"][2]["params"] == []
    assert found["rules"][0]["tensor"] == "output.grad"
    assert found["chains"]["head output.grad"] == ["it"]
    assert found["chains"]["head.weight"] == ["norms"]


def test_rules_for_one_of_several_models() -> None:
    one = {"id": "it", "action": "zero", "params": "head.*", "model": "Generator"}
    other = {
        "id": "other",
        "action": "zero",
        "params": "nope",
        "model": "Critic",
        "expect": {"params": 3},
    }
    plan = bind(one, other)
    assert names(plan) == ["head.weight", "head.bias"]
    assert plan.rule_warnings["other"] == (
        "is for a model of the class Critic, this one is Generator",
    )
    assert plan.of("other") == ()
    assert names(bind({**one, "model": "Gen*"})) == ["head.weight", "head.bias"]
    assert names(bind({**one, "model": "Module"})) == ["head.weight", "head.bias"]
