"""Rules bound to names: what matches, what is refused, what the plan prints. Nothing is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES, Tied
from ranks import Json
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradsurgeon
from gradsurgeon import BindError
from gradsurgeon.language.planning import Plan, from_model, slots


def rule(**options: Any) -> Json:
    return {"id": "it", "action": "zero", "params": "*", **options}


def bind(model: nn.Module, *rules: Json) -> Plan:
    return gradsurgeon.plan(model, {"version": 1, "rules": list(rules)})


def names(plan: Plan, rule_id: str = "it") -> list[str]:
    return [binding.name for binding in plan.of(rule_id)]


def deep(layers: int = 12) -> nn.Module:
    return nn.ModuleDict({"h": nn.ModuleList([_block() for _ in range(layers)])})


def _block() -> nn.Module:
    return nn.ModuleDict(
        {"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2, bias=False), "norm": nn.LayerNorm(2)}
    )


# --- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"params": "*"}, 60),
        ({"params": "h.{0..2}.*"}, 15),
        ({"params": "h.1*"}, 15),  # 1, 10 and 11: what a range is there to avoid
        ({"params": ["h.0.attn.*", "h.0.*.weight"]}, 4),
        ({"params": "re:h\\.\\d\\.attn\\..*"}, 20),
        ({"params": "*", "exclude": "*.bias"}, 36),
        ({"params": "*", "exclude": ["*.bias", "*.norm.*"]}, 24),
        ({"params": "*", "where": {"module_type": "Linear"}}, 36),
        ({"params": "*", "where": {"module_type": "*Norm"}}, 24),
        ({"params": "*", "where": {"module_type": "Module"}}, 60),
        ({"params": "*", "where": {"ndim": 2}}, 24),
        ({"params": "*", "where": {"numel": {"max": 3}}}, 36),
        ({"params": "*", "where": {"numel": {"min": 3}}}, 24),
        ({"params": "*", "where": {"dtype": "float32"}}, 60),
        ({"params": "*", "where": {"requires_grad": True, "ndim": 1}}, 36),
    ],
)
def test_what_is_selected(options: Json, count: int) -> None:
    assert len(names(bind(deep(), rule(**options)))) == count


def test_bindings_say_what_they_are() -> None:
    plan = bind(
        nn.Linear(3, 2),
        rule(id="early", params="weight"),
        rule(id="late", params="weight", at="step"),
        {"id": "norms", "action": "norm-log", "params": "bias"},
        {"id": "trap", "action": "nan-trap", "params": "bias"},
    )
    assert [(b.rule, b.name, b.tensor, b.point, b.hook, b.numel) for b in plan.bindings] == [
        ("early", "weight", "grad", "backward", "tensor hook", 6),
        ("late", "weight", "grad", "step", "step pre-hook", 6),
        ("norms", "bias", "grad", "accumulated", "end of backward", 2),
        ("trap", "bias", "grad", "accumulated", "end of backward, step pre-hook", 2),
    ]
    assert plan.chains == {"weight": ("early", "late"), "bias": ("norms", "trap")}


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["emb.weight", "head.weight", "*.weight"])
def test_every_alias_matches_and_the_parameter_is_bound_once(pattern: str) -> None:
    plan = bind(Tied(), rule(params=pattern, exclude=["body.*"], optional=True))
    assert [(b.name, b.aliases) for b in plan.of("it")] == [("emb.weight", ("head.weight",))]
    assert "emb.weight (tied to head.weight)" in str(plan)


def test_excluding_one_alias_excludes_the_parameter_with_a_notice() -> None:
    plan = bind(Tied(), rule(exclude="head.*"))
    assert names(plan) == ["body.weight", "body.bias"]
    assert plan.rule_warnings["it"][0] == (
        'exclude "head.*" also removes emb.weight: the same tensor'
    )


class Inner(nn.Module):
    """Has a child that really is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self.fc = nn.Linear(2, 2, bias=False)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        compiled,
        checkpoint_wrapper,
        lambda model: nn.DataParallel(compiled(model)),
    ],
    ids=["bare", "DataParallel", "compile", "checkpoint", "both"],
)
def test_segments_of_wrappers_are_dropped_and_only_those(wrap: Any) -> None:
    assert [param.name for param in from_model(wrap(Inner())).params] == [
        "module.weight",
        "fc.weight",
    ]


def test_a_wrapper_inside_the_model() -> None:
    model = Inner()
    model.fc = checkpoint_wrapper(model.fc)  # type: ignore[assignment]
    assert names(bind(model, rule(params="fc.weight"))) == ["fc.weight"]


def test_names_are_those_of_named_parameters() -> None:
    for case in CASES.values():
        model = case.make()
        manifest = from_model(model)
        assert [param.name for param in manifest.params] == [n for n, _ in model.named_parameters()]
        everything = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        assert sorted(slot.name for slot in slots(model)) == sorted(everything)


# --- refusals -------------------------------------------------------------------------------------


def complaints(model: nn.Module, *rules: Json) -> list[str]:
    with pytest.raises(BindError, match="nothing was changed") as caught:
        bind(model, *rules)
    return list(caught.value.complaints)


def test_no_match_names_the_nearest() -> None:
    (text,) = complaints(deep(), rule(params="h.*.atn.weight"))
    assert text.startswith(
        '<dict> rules[0].params: rule it: no parameter of the model matches "h.*.atn.weight"; '
    )
    assert "h.*.attn.weight" in text


def test_a_bare_name_is_proposed_as_a_pattern() -> None:
    (text,) = complaints(deep(), rule(params="attn"))
    assert 'did you mean "*.attn.*" (it matches 24)' in text


def test_all_complaints_come_at_once() -> None:
    found = complaints(
        deep(),
        rule(id="a", params="nope"),
        rule(id="b"),
        rule(id="c", params="*.weight", where={"ndim": 7}),
        rule(id="d", params="*.mlp.*", exclude="*.weight"),
        rule(id="e", expect={"params": 59}),
    )
    assert [text.partition("rule ")[2][0] for text in found] == ["a", "c", "d", "e"]
    assert found[1].endswith(
        "36 parameters match (h.0.attn.weight, h.0.mlp.weight, h.0.norm.weight and 33 more), but `where` "
        "keeps none of them: `ndim`"
    )
    assert found[2].endswith("12 parameters match, but `exclude` removes all of them")
    assert found[3].endswith(
        "expected 59 parameters, matched 60 (h.0.attn.weight, h.0.attn.bias, h.0.mlp.weight and 57 more); "
        "correct the pattern or the `expect`"
    )


def test_optional_opts_out_of_no_match_but_not_of_expect() -> None:
    plan = bind(deep(), rule(params="nope", optional=True))
    assert names(plan) == []
    assert plan.rule_warnings["it"][0] == "matches nothing (optional)"
    (text,) = complaints(deep(), rule(params="nope", optional=True, expect={"params": 1}))
    assert "expected 1 parameter, matched 0;" in text


def test_lazy_modules_are_refused_with_the_remedy() -> None:
    (text,) = complaints(nn.LazyLinear(3), rule())
    assert "2 parameters have no shape yet (weight, bias)" in text
    assert "run one forward pass before applying rules" in text


def test_doubts_are_warnings() -> None:
    model = CASES["frozen"].make()
    plan = bind(
        model,
        rule(id="frozen", params="body.*"),
        rule(id="item", params=["head.*", "nope.*"]),
        rule(id="exclude", params="head.*", exclude="body.*"),
    )
    assert plan.rule_warnings["frozen"][0] == (
        "all matched parameters have `requires_grad` off: the rule acts once it is on"
    )
    assert plan.rule_warnings["item"][0].startswith('pattern "nope.*" matches nothing; ')
    assert plan.rule_warnings["exclude"][0] == 'exclude "body.*" removes nothing from the match'
    assert [binding.dormant for binding in plan.of("frozen")] == [True, True]


# --- what is printed ------------------------------------------------------------------------------


def test_the_plan_as_a_table() -> None:
    plan = bind(
        deep(2),
        {"id": "norms", "action": "norm-log", "params": "*"},
        rule(id="cut", params="*.bias", steps={"from": 5, "to": 10, "every": 2}),
        {
            "id": "bound",
            "action": "clamp",
            "params": "h.0.*",
            "at": "step",
            "max": 1.0,
            "steps": {"from": 3},
        },
    )
    assert str(plan).splitlines() == [
        "plan: <dict> on ModuleDict: 3 rules, 10 parameters, 28 elements",
        "",
        "  rule   action    at           hook                     binds  elements  steps",
        "  norms  norm-log  accumulated  end of backward  10 parameters        28  all",
        "  cut    zero      backward     tensor hook       4 parameters         8  5..9 every 2",
        "  bound  clamp     step         step pre-hook     5 parameters        14  3..",
        "",
        "effects per tensor, in order of effect",
        "  norms (at accumulated) -> bound (at step)",
        "      3 parameters: h.0.attn.weight, h.0.mlp.weight, h.0.norm.weight",
        "  cut (at backward) -> norms (at accumulated) -> bound (at step)",
        "      2 parameters: h.0.attn.bias, h.0.norm.bias",
        "  norms (at accumulated)",
        "      3 parameters: h.1.attn.weight, h.1.mlp.weight, h.1.norm.weight",
        "  cut (at backward) -> norms (at accumulated)",
        "      2 parameters: h.1.attn.bias, h.1.norm.bias",
        "",
        "to know",
        "  cut: zero is not freeze: weight decay and momentum still move the weight",
    ]


def test_layers_are_folded() -> None:
    text = str(bind(deep(), rule(params=["*.mlp.*", "h.{3,5}.attn.weight"])))
    assert "14 parameters: h.{0..11}.mlp.weight, h.{3,5}.attn.weight" in text


def test_names_of_the_model_are_escaped() -> None:
    model = nn.ModuleDict({"a\x1b[31m": nn.Linear(2, 2, bias=False)})
    text = str(bind(model, rule()))
    assert "\x1b" not in text
    assert "a\\x1b[31m.weight" in text


def test_planning_touches_nothing_and_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(50_000, 50_000) for _ in range(4)])
    plan = bind(model, rule())
    assert plan.manifest.elements == 4 * (50_000**2 + 50_000)
    assert all(param._backward_hooks is None for param in model.parameters())
