"""A difference: nothing where only the writing differs, and a mirror image of the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Json

import gradsurgeon
from gradsurgeon.cli.review import text
from gradsurgeon.cli.review.difference import compare
from gradsurgeon.language import planning
from gradsurgeon.language.planning import Manifest, ModuleEntry, Param
from gradsurgeon.language.schema import RuleSet

# Thousands of inputs take the same few lines, and tracing them twice the time.
pytestmark = pytest.mark.no_cover

NAMES = [f"{stem}.{at}.{leaf}" for stem in "ab" for at in range(3) for leaf in ("w", "bias")]
MANIFEST = Manifest(
    "Net",
    tuple(Param(name, (), (2,), "float32", True, ("Linear", "Module")) for name in NAMES),
    (ModuleEntry(".", (), ("Net", "Module")), ModuleEntry("a.0", (), ("Linear", "Module"))),
    ("Net", "Module"),
)

patterns = st.sampled_from(["*", "a.*", "*.bias", "b.{0..1}.*", "a.0.w", "nothing.*"])
steps = st.sampled_from([{"from": 0, "to": 10}, {"every": 3}, {"from": 5, "to": 50, "every": 5}])
bounds = st.sampled_from([-2.0, -1e-3, 0.0, 1.0, 2.5])
points = st.sampled_from(["backward", "step"])
actions = st.one_of(
    st.fixed_dictionaries({"action": st.just("zero")}, optional={"at": points}),
    st.fixed_dictionaries({"action": st.just("clamp"), "at": points, "max": bounds}),
    st.fixed_dictionaries(
        {"action": st.just("clip-norm"), "max_norm": st.sampled_from([0.5, 1.0, 2.0])}
    ),
    st.fixed_dictionaries(
        {"action": st.just("nan-trap"), "then": st.sampled_from(["raise", "warn"])}
    ),
    st.fixed_dictionaries(
        {"action": st.just("norm-log")},
        optional={
            "at": points,
            "stats": st.lists(st.sampled_from(["l2", "max"]), min_size=1, unique=True),
        },
    ),
    st.just({"action": "freeze"}),
)
extras = st.fixed_dictionaries(
    {},
    optional={
        "exclude": st.lists(patterns, min_size=1, max_size=2, unique=True),
        "steps": steps,
        "optional": st.booleans(),
        "where": st.just({"ndim": 1}),
        "expect": st.builds(lambda number: {"params": number}, st.integers(0, 12)),
    },
)
bodies = st.builds(
    lambda action, params, extra: {"params": params, **action, **extra},
    actions,
    st.one_of(patterns, st.lists(patterns, min_size=1, max_size=3, unique=True)),
    extras,
)
ids = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True)


@st.composite
def rule_lists(draw: st.DrawFn) -> list[Json]:
    return [{"id": one, **draw(bodies)} for one in draw(ids)]


@st.composite
def rewritten(draw: st.DrawFn, rules: list[Json]) -> str:
    """Return rules as a text: keys in any order, quoted in any way, with comments, flow or block."""

    def scalar(value: Any) -> str:
        if isinstance(value, dict):
            items = draw(st.permutations(list(value.items())))
            return f"{{{', '.join(f'{key}: {scalar(item)}' for key, item in items)}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(scalar, draw(st.permutations(value))))}]"
        if not isinstance(value, str):
            return json.dumps(value)
        quoted = [json.dumps(value), f"'{value}'"]
        return draw(st.sampled_from([*quoted, value] if value.isalpha() else quoted))

    lines = [draw(st.sampled_from(["version: 1", "# a comment\nversion: 1  # another"])), "rules:"]
    for rule in rules:
        keys = draw(st.permutations(list(rule)))
        if draw(st.booleans()):
            lines.append(f"  - {scalar(rule)}")
            continue
        for at, key in enumerate(keys):
            comment = draw(st.sampled_from(["", "  # why", "\n    # below"]))
            lines.append(f"  {' ' if at else '-'} {key}: {scalar(rule[key])}{comment}")
    return "\n".join(lines) + "\n"


def load(rules: list[Json]) -> RuleSet:
    return gradsurgeon.load({"version": 1, "rules": rules})


@settings(max_examples=examples(100))
@given(st.data())
def test_a_file_written_in_another_way_is_no_difference(data: st.DataObject) -> None:
    rules = data.draw(rule_lists())
    found = compare(load(rules), gradsurgeon.load(data.draw(rewritten(rules))), MANIFEST)
    assert not found.in_effect
    plain = found.to_dict()
    for key in ("added", "removed", "changed", "params", "tensors", "warnings"):
        assert plain[key] == []


@settings(max_examples=examples(200))
@given(rule_lists(), rule_lists())
def test_the_way_back_is_a_mirror_image(before: Any, after: Any) -> None:
    old, new = load(before), load(after)
    there, back = compare(old, new, MANIFEST), compare(new, old, MANIFEST)
    turned = {"+": "-", "-": "+", "~": "~"}
    assert {(one.sign, one.old_id, one.id) for one in there.rules} == {
        (turned[one.sign], one.id, one.old_id) for one in back.rules
    }
    assert there.covered == back.covered[::-1]
    assert there.in_effect == back.in_effect
    # A renamed rule has its new id in both chains.
    renamed = {one.old_id: one.id for one in there.rules}
    mirrored = []
    for one in back.chains:
        chains = [tuple(renamed.get(rule, rule) for rule in chain) for chain in one[1:]]
        mirrored.append((one.name, *chains[::-1]))
    assert [(one.name, one.before, one.after) for one in there.chains] == mirrored
    options = [{o.name for one in side.rules for o in one.options} for side in (there, back)]
    assert options[0] == options[1]


@settings(max_examples=examples(100))
@given(rule_lists(), rule_lists())
def test_chains_are_those_of_the_plan(before: Any, after: Any) -> None:
    for rules in (before, after):  # or they would not bind
        for rule in rules:
            rule["optional"] = True
            rule.pop("expect", None)
    old, new = load(before), load(after)
    found = compare(old, new, MANIFEST)
    now_called = {one.old_id: one.id for one in found.rules}
    chains = [planning.bind(rules, MANIFEST).chains for rules in (old, new)]
    for name, chain in chains[0].items():
        chains[0][name] = tuple(now_called.get(rule, rule) for rule in chain)
    for one in found.chains:
        assert (one.before, one.after) == tuple(chain.get(one.name, ()) for chain in chains)
    for name in {param.name for param in MANIFEST.params} - {one.name for one in found.chains}:
        first, second = (chain.get(name, ()) for chain in chains)
        assert first == second


@settings(max_examples=examples(100))
@given(rule_lists(), rule_lists())
def test_it_can_always_be_written(before: Any, after: Any) -> None:
    found = compare(load(before), load(after), MANIFEST)
    json.dumps(found.to_dict())
    assert text.render(found)
    assert ("\n+ " in text.markdown(found)) == bool([c for c in found.rules if c.sign == "+"])
