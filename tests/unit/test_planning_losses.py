"""Rules on the gradients of several losses: what binds, what is refused and why, what the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from ranks import Json
from several_losses import Heads
from torch import nn

import gradsurgeon
from gradsurgeon import BindError
from gradsurgeon.actions._methods import METHODS
from gradsurgeon.actions.combine import MethodName
from gradsurgeon.language.planning import Manifest, Plan, bind, from_model

OF_LOSSES: Json = {"losses": ["seg", "depth"]}


CONFLICT = {"id": "tasks", "action": "conflict", **OF_LOSSES, "params": "trunk.*"}


def combine(rule_id: str = "surgery", **options: Any) -> Json:
    given = {"params": "trunk.*", "method": "upgrad", **options}
    losses = {} if "modules" in given else OF_LOSSES
    return {"id": rule_id, "action": "combine", **losses, **given}


def on_heads(rule_id: str = "heads", **options: Any) -> Json:
    heads = {"modules": ["seg", "depth"], "tensor": "input.grad", **options}
    return {"id": rule_id, "action": "combine", "method": "pcgrad", **heads}


def plan(*rules: Json, model: nn.Module | None = None) -> Plan:
    return gradsurgeon.plan(model or Heads(), {"version": 1, "rules": list(rules)})


def refused(*rules: Json, manifest: Manifest | None = None) -> list[str]:
    loaded = gradsurgeon.load({"version": 1, "rules": list(rules)})
    with pytest.raises(BindError) as error:
        bind(loaded, manifest or from_model(Heads()))
    return list(error.value.complaints)


def sharded(word: str) -> Manifest:
    manifest = from_model(Heads())
    params = (replace(param, sharding=word) for param in manifest.params)  # type: ignore[arg-type]
    return replace(manifest, params=tuple(params))


class TestTwoThatMeet:
    def test_are_an_error_that_names_both_and_a_parameter(self) -> None:
        (text,) = refused(combine("first"), combine("second", params="trunk.0.*", method="pcgrad"))
        assert "rule second: first combines the gradients of trunk.0.weight, " in text
        assert "`exclude`" in text

    def test_every_pair_is_named(self) -> None:
        found = refused(*(combine(f"rule-{number}") for number in range(3)))
        assert len(found) == 3

    def test_are_an_error_on_modules_as_well(self) -> None:
        (text,) = refused(on_heads(), on_heads("again", modules="depth"))
        assert "rule again: heads combines the gradients of depth already" in text

    def test_go_by_the_tensors_of_a_module(self) -> None:
        first, second = (on_heads(f"the-{at}", tensor=f"input[{at}].grad") for at in range(2))
        assert plan(first, second).of("the-1")
        assert len(refused(first, second, on_heads())) == 2

    @pytest.mark.parametrize(
        "other",
        [
            combine("other", params="seg.*"),
            combine("other", exclude="trunk.*", params="*"),
            CONFLICT,
            on_heads("other"),
        ],
        ids=["elsewhere", "excluded", "conflict", "on modules"],
    )
    def test_others_do_not_meet(self, other: Json) -> None:
        assert plan(combine(), other).of(other["id"])

    def test_one_after_the_other_is_fine(self) -> None:
        early, late = combine("early", steps={"to": 5}), combine("late", steps={"from": 5})
        assert plan(early, late).of("late")
        assert refused(early, {**late, "steps": {"from": 4}})

    def test_a_tied_parameter_is_met_under_either_name(self) -> None:
        model = Heads()
        model.seg.weight = model.trunk[2].weight
        (text,) = refused(
            combine(), combine("head", params="seg.weight"), manifest=from_model(model)
        )
        assert "trunk.2.weight" in text


class TestRefused:
    @pytest.mark.parametrize("word", ["fully_shard", "FullyShardedDataParallel"])
    @pytest.mark.parametrize("rule", [combine(), CONFLICT], ids=["combine", "conflict"])
    def test_divided_parameters_with_the_form_on_modules(self, word: str, rule: Json) -> None:
        (text,) = refused(rule, manifest=sharded(word))
        assert word in text
        assert "trunk.0.weight" in text
        assert "`tensor: input.grad`" in text

    @pytest.mark.parametrize("word", ["fully_shard", "tensor parallel"])
    def test_the_form_on_modules_is_not(self, word: str) -> None:
        loaded = gradsurgeon.load({"version": 1, "rules": [on_heads()]})
        assert bind(loaded, sharded(word)).of("heads")

    def test_sparse_gradients(self) -> None:
        trunk = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 8))
        (text,) = refused(combine(), manifest=from_model(Heads(trunk)))
        assert "1 parameters are sparse (trunk.0.weight)" in text
        assert "`exclude`" in text
        assert len(plan(combine(exclude="trunk.0.*"), model=Heads(trunk)).of("surgery")) == 2


class TestPlan:
    def test_the_cost_is_told_once_for_all_rules(self) -> None:
        look = {
            "id": "tasks",
            "action": "conflict",
            "losses": ["seg", "edges"],
            "params": "trunk.0.*",
        }
        found = plan(look, combine())
        # 6 * 16 + 16 + 16 * 8 + 8 elements, for each of three losses.
        assert found.warnings[0] == (
            "gradsurgeon.backward takes one more backward pass per loss, and meanwhile keeps 3 gradients of 248 "
            "elements and the graph"
        )
        assert sum("backward pass per loss" in one for one in found.warnings) == 1
        assert not any("backward pass per loss" in one for one in plan(on_heads()).warnings)

    @pytest.mark.parametrize("method", METHODS)
    def test_the_scale_is_told(self, method: str) -> None:
        options: dict[str, Json] = {
            "cagrad": {"c": 1},
            "fairgrad": {"alpha": 1},
        }
        scale, *_ = plan(combine(method=method, **options.get(method, {}))).rule_warnings["surgery"]
        assert f"{method}" in scale
        assert f"gives {METHODS[method].size}" in scale
        assert ("mind the learning rate" in scale) is (METHODS[method].size != "the sum")

    def test_a_preference_is_no_average(self) -> None:
        scale, *_ = plan(combine(preference={"seg": 2})).rule_warnings["surgery"]
        assert "gives the sum by its `preference`" in scale

    def test_the_call_is_told_on_parameters_and_the_ranks_on_modules(self) -> None:
        found = plan(combine(), on_heads()).rule_warnings
        assert 'gradsurgeon.backward({"seg": ..., "depth": ...})' in found["surgery"][-1]
        assert found["heads"][-1] == "each rank uses its own gradients"

    def test_it_acts_before_all_others_wherever_it_stands(self) -> None:
        early = {"id": "early", "action": "clamp", "params": "trunk.*", "at": "backward", "max": 1}
        found = plan(early, {"id": "look", "action": "norm-log", "params": "*"}, combine())
        assert found.chains["trunk.0.bias"] == ("surgery", "early", "look")

    def test_on_modules_it_acts_on_what_edits_of_each_have_left(self) -> None:
        edit = {
            "id": "half",
            "action": "scale",
            "modules": "seg",
            "tensor": "input.grad",
            "factor": 2,
        }
        assert plan(on_heads(), edit).chains["seg input.grad"] == ("half", "heads")

    def test_names_of_losses_are_escaped(self) -> None:
        text = str(plan(combine(losses=["seg\x1b[2J", "depth"])))
        assert "\x1b" not in text

    def test_json_carries_losses_and_method(self) -> None:
        norms = {"id": "norms", "action": "norm-log", "params": "*"}
        text = json.dumps(plan(CONFLICT, combine(), on_heads(), norms).to_dict())
        tasks, surgery, heads, other = json.loads(text)["rules"]
        assert (tasks["losses"], tasks["method"]) == (["seg", "depth"], None)
        assert (surgery["losses"], surgery["method"]) == (["seg", "depth"], "upgrad")
        assert (heads["losses"], heads["method"]) == ([], "pcgrad")
        assert not {"losses", "method"} & set(other)


def test_the_methods_of_the_class_are_those_of_the_table() -> None:
    assert get_args(MethodName) == tuple(METHODS)
