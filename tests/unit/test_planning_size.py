"""Many rules, many names: what a plan takes and prints grows with them, not with their pairs."""

from __future__ import annotations

import pytest
from bounds import within

import gradsurgeon
from gradsurgeon.errors import BindError
from gradsurgeon.language.planning import Manifest, ModuleEntry, Param, Plan, bind


def model(*names: str, trains: bool = True) -> Manifest:
    params = (Param(name, (), (2,), "float32", trains, ("Linear",)) for name in names)
    return Manifest("Net", tuple(params), (ModuleEntry(".", (), ("Net",)),))


def bound(manifest: Manifest, *rules: dict[str, object]) -> Plan:
    return bind(gradsurgeon.load({"version": 1, "rules": list(rules)}), manifest)


def scale(number: int, params: object = "*", **more: object) -> dict[str, object]:
    return {"id": f"r-{number}", "action": "scale", "params": params, "factor": 0.5, **more}


@pytest.mark.slow
def test_many_rules_on_the_same_tensors_are_shown_in_short() -> None:
    rules = [scale(number) for number in range(500)]
    with within(6):
        plan = bound(model(*(f"layers.{number}.weight" for number in range(200))), *rules)
        text = str(plan)
    assert text.count(" -> r-499 (at backward)") == 1
    assert len(plan.to_dict()["chains"]["layers.0.weight"]) == 500


@pytest.mark.slow
def test_many_patterns_that_match_nothing_are_looked_into_a_few_times() -> None:
    manifest = model(*(f"layers.{number}.weight" for number in range(10_000)))
    wrong = [f"lyers.{number}.weigth" for number in range(20_000)]
    with within(12):
        (rule,) = bound(manifest, scale(0, [*wrong, "*"])).rule_warnings.values()
        with pytest.raises(BindError) as caught:
            bound(manifest, *(scale(number, name) for number, name in enumerate(wrong[:3_000])))
    assert rule[20] == "and 19980 more doubts of this kind"
    assert len(caught.value.complaints) == 3_000
    assert str(caught.value).endswith("\nand 2900 more")
    with pytest.raises(BindError, match=r'"lyers\.2\.weigth" and 97 more; closest names'):
        bound(model("layers.1.weight"), scale(0, wrong[:100]))
