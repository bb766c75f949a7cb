"""What neighbouring rules on one tensor amount to, and what is run where on which tensors."""

from __future__ import annotations

from typing import Any

import pytest

import gradsurgeon
from gradsurgeon.actions import ACTIONS, Rule
from gradsurgeon.compiler import Program, compile_plan, listing
from gradsurgeon.planning import Manifest, Param

BIG, SMALL = 1e5, 1e-5


def rule(name: str, at: str = "step", **options: Any) -> Rule:
    if name == "sanitize":
        at = "backward"
    return ACTIONS[name].model_validate({"id": "it", "params": "*", "at": at, **options})


def options_of(merged: Rule | None) -> dict[str, object] | None:
    """Return the action of a rule and its options, ``None`` where there is no rule."""
    if merged is None:
        return None
    given = {
        name: getattr(merged, name)
        for name in ("min", "max", "factor")
        if getattr(merged, name, None) is not None
    }
    return {"action": merged.action, **given}


def clamp(low: float | None = None, high: float | None = None) -> dict[str, Any]:
    bounds = {"min": low, "max": high}
    return {"name": "clamp"} | {key: end for key, end in bounds.items() if end is not None}


def scale(factor: float) -> dict[str, Any]:
    return {"name": "scale", "factor": factor}


ZERO, SANITIZE = {"name": "zero"}, {"name": "sanitize"}


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (clamp(-3, 2), clamp(-1, 5), clamp(-1, 2)),
        (clamp(-1, 5), clamp(-3, 2), clamp(-1, 2)),
        (clamp(low=0), clamp(high=1), clamp(0, 1)),
        (clamp(high=1), clamp(high=2), clamp(high=1)),
        (clamp(low=1), clamp(low=2), clamp(low=2)),
        # They do not meet: everything becomes the bound of the second that is nearer to the first.
        (clamp(2, 3), clamp(-1, 1), clamp(1, 1)),
        (clamp(-3, -2), clamp(-1, 1), clamp(-1, -1)),
        (clamp(low=2), clamp(high=1), clamp(1, 1)),
        (scale(2), scale(3), scale(6)),
        (scale(-0.5), scale(0.5), scale(-0.25)),
        (scale(1), scale(0.1), scale(0.1)),
        (scale(0), scale(0.5), scale(0)),
        (clamp(1, 2), ZERO, ZERO),
        (scale(2), ZERO, ZERO),
        (SANITIZE, ZERO, ZERO),
        (ZERO, ZERO, ZERO),
        (ZERO, scale(-2), ZERO),
        (ZERO, SANITIZE, ZERO),
        (ZERO, clamp(-1, 1), ZERO),
        # Bounds that exclude 0 move it.
        (ZERO, clamp(1, 2), None),
        # What the first makes infinite, or loses, the second does not bring back.
        (scale(1e30), scale(1e-30), None),
        (scale(0.5), scale(2), None),
        (scale(0), scale(2), None),
        # A factor that float16 cannot hold, which holds both of them.
        (scale(1000), scale(1000), None),
        (scale(0.001), scale(0.001), None),
        (scale(1e-200), scale(1e-200), None),
        (scale(2), clamp(-1, 1), None),
        (clamp(-1, 1), scale(2), None),
        (SANITIZE, scale(2), None),
        (clamp(-1, 1), SANITIZE, None),
    ],
)
def test_what_two_edits_amount_to(
    first: dict[str, Any], second: dict[str, Any], both: dict[str, Any] | None
) -> None:
    found = rule(**second).merged(rule(**first))
    assert options_of(found) == options_of(None if both is None else rule(**both))


PARAMS = ("a.weight", "a.bias", "b.weight", "b.bias")


def plan_of(*rules: dict[str, Any]) -> gradsurgeon.Plan:
    params = [Param(name, (), (2, 2), "float32", True, ("Linear",)) for name in PARAMS]
    document = {"version": 1, "rules": [{"params": "*", "at": "step", **one} for one in rules]}
    return gradsurgeon.plan(Manifest("Net", tuple(params)), document)


def halve(name: str, params: str = "*", **options: Any) -> dict[str, Any]:
    return {"id": name, "action": "scale", "params": params, "factor": 0.5, **options}


def bound(name: str, high: float, params: str = "*", **options: Any) -> dict[str, Any]:
    return {"id": name, "action": "clamp", "params": params, "max": high, **options}


def log(name: str, params: str = "*") -> dict[str, Any]:
    return {"id": name, "action": "norm-log", "params": params}


def in_update(program: Program) -> list[tuple[str, str]]:
    """Return what is run at the step: the id and the parameters."""
    return [
        (group.piece.rule.id, " ".join(program.names[tensor] for tensor in group.tensors))
        for group in program.in_update
    ]


def in_hook(program: Program) -> dict[str, list[str]]:
    return {
        program.names[tensor]: [piece.rule.id for piece in pieces]
        for tensor, pieces in program.in_hook.items()
    }


ALL = " ".join(PARAMS)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([halve("h1"), halve("h2")], [("h1+h2", ALL)]),
        # On some of the parameters one of them is alone.
        (
            [halve("h1", "a.*"), halve("h2", "*.weight")],
            [("h1", "a.bias"), ("h1+h2", "a.weight"), ("h2", "b.weight")],
        ),
        # What stands between them acts on other parameters.
        (
            [halve("h1", "a.*"), bound("low", 1.0, "b.*"), halve("h2")],
            [("low", "b.weight b.bias"), ("h1+h2", "a.weight a.bias"), ("h2", "b.weight b.bias")],
        ),
        # What looks must see what it would see.
        (
            [halve("h1"), log("seen", "a.*"), halve("h2")],
            [
                ("h1", "a.weight a.bias"),
                ("seen", "a.weight a.bias"),
                ("h2", "a.weight a.bias"),
                ("h1+h2", "b.weight b.bias"),
            ],
        ),
        (
            [halve("h1"), {"id": "kept", "action": "capture"}, halve("h2")],
            [("h1", ALL), ("kept", ALL), ("h2", ALL)],
        ),
        (
            [{"id": "off", "action": "zero"}, log("seen"), {"id": "again", "action": "zero"}],
            [("off", ALL), ("seen", ALL), ("again", ALL)],
        ),
        (
            [
                {"id": "off", "action": "zero"},
                {"id": "kept", "action": "capture"},
                {"id": "again", "action": "zero"},
            ],
            [("off", ALL), ("kept", ALL), ("again", ALL)],
        ),
        # A norm over the rule is one over all of its parameters, as they are by then.
        (
            [
                halve("h1"),
                {"id": "clip", "action": "clip-norm", "max_norm": 1.0, "per": "rule"},
                {"id": "off", "action": "zero"},
            ],
            [("h1", ALL), ("clip", ALL), ("off", ALL)],
        ),
        ([halve("h1"), halve("h2", steps={"from": 10})], [("h1", ALL), ("h2", ALL)]),
        (
            [halve("h1", steps={"every": 2}), halve("h2", steps={"every": 2})],
            [("h1+h2", ALL)],
        ),
        # An erasure takes in what could not be made one before.
        ([halve("h1"), bound("low", 1.0), {"id": "off", "action": "zero"}], [("h1+low+off", ALL)]),
        ([halve("h1"), bound("low", 1.0), bound("lower", 0.5)], [("h1", ALL), ("low+lower", ALL)]),
    ],
)
def test_what_is_run_at_the_step(
    rules: list[dict[str, Any]], expected: list[tuple[str, str]]
) -> None:
    plan = plan_of(*rules)
    program = compile_plan(plan)
    assert sorted(in_update(program)) == sorted(expected)
    by_itself = [(stage.rule.id, stage.tensors) for stage in program.at_step]
    naive = compile_plan(plan, optimize=False)
    assert [(group.piece.rule.id, group.tensors) for group in naive.in_update] == by_itself
    assert naive.merged == []


def test_every_tensor_keeps_the_order_of_its_rules() -> None:
    rules = [halve("h1", "a.*"), bound("low", 1.0, "*.bias"), halve("h2"), halve("h3", "*.weight")]
    program = compile_plan(plan_of(*rules))
    for tensor, name in enumerate(PARAMS):
        parts = [
            part.id
            for group in program.in_update
            if tensor in group.tensors
            for part in group.piece.parts
        ]
        assert tuple(parts) == plan_of(*rules).chains[name]


def test_what_the_hooks_run() -> None:
    at = {"at": "backward"}
    rules = [
        halve("h1", **at),
        halve("h2", "*.weight", **at),
        {"id": "off", "action": "zero", "params": "b.bias", **at},
        bound("low", 1.0),
    ]
    program = compile_plan(plan_of(*rules))
    assert in_hook(program) == {
        "a.weight": ["h1+h2"],
        "a.bias": ["h1"],
        "b.weight": ["h1+h2"],
        "b.bias": ["h1+off"],
    }
    # What is reported on is every rule by itself.
    assert [one.id for one in program.per_tensor[3]] == ["h1", "off"]
    assert [one.id for one in program.rules] == ["h1", "h2", "off", "low"]
    assert [one.id for one in program.merged] == ["h1+h2", "h1+off"]
    assert in_hook(compile_plan(plan_of(*rules), optimize=False))["a.weight"] == ["h1", "h2"]


def test_the_listing_shows_programs_that_are_shorter_and_no_others() -> None:
    rules = [
        halve("h1", at="backward"),
        halve("h2", "*.weight", at="backward"),
        bound("low", 1.0, "a.*"),
        bound("lower", 0.3, "a.weight", min=-0.5),
        {**log("seen", "a.weight"), "stats": ["l1", "l2"]},
    ]
    assert listing(plan_of(*rules)).splitlines() == [
        "programs that run shorter than they are written",
        "  at backward: h1 (scale factor 0.5) -> h2 (scale factor 0.5)",
        "      runs as: h1+h2 (scale factor 0.25)",
        "  at step: low (clamp max 1.0) -> lower (clamp min -0.5, max 0.3) -> "
        "seen (norm-log stats l1 l2)",
        "  runs as: low+lower (clamp min -0.5, max 0.3) -> seen (norm-log stats l1 l2)",
        "      1 parameter: a.weight",
        "  at backward: h1 (scale factor 0.5) -> h2 (scale factor 0.5)",
        "      runs as: h1+h2 (scale factor 0.25)",
        "      1 parameter: b.weight",
    ]
    assert listing(plan_of(halve("h1"), bound("low", 1.0))) == ""
