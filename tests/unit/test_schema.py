"""Rules as text, as plain data and built in Python: what is accepted, what is refused, and where."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import report_cases
from pairs import singly, slow
from pydantic import ValidationError
from ranks import Json

import gradsurgeon
from gradsurgeon.actions import ACTIONS, Rule
from gradsurgeon.actions._options import keys_of
from gradsurgeon.errors import Problem, RuleFileError
from gradsurgeon.language import schema

ZERO = {"id": "one", "action": "zero", "params": "*"}


PLAIN: Any = report_cases.read(Path(__file__).parents[1] / "cases" / "schema" / "plain.yaml")


def refused(rules: Any) -> list[Problem]:
    with pytest.raises(RuleFileError) as caught:
        gradsurgeon.load(rules)
    return list(caught.value.problems)


class TestValues:
    def test_options_become_typed_values(self) -> None:
        text = (
            "version: 1\nrules:\n  - id: one\n    action: clamp\n    params: '*.weight'\n"
            "    exclude: [a, b]\n    where: {ndim: 2, numel: {min: 3}}\n    at: step\n    min: -1e-3\n"
            "    max: 1\n    steps: {from: 5, to: 9, every: 2}\n    expect: {params: 6}\n"
        )
        (rule,) = gradsurgeon.load(text).rules
        assert rule.model_dump() == {
            "id": "one",
            "action": "clamp",
            "params": ("*.weight",),
            "modules": None,
            "tensors": None,
            "tensor": None,
            "exclude": ("a", "b"),
            "where": {
                "module_type": None,
                "owns_params": None,
                "ndim": 2,
                "dtype": None,
                "numel": {"min": 3, "max": None},
                "requires_grad": None,
            },
            "at": "step",
            "steps": {"from_": 5, "to": 9, "every": 2},
            "expect": {"params": 6},
            "optional": False,
            "model": None,
            "when": None,
            "min": -0.001,
            "max": 1.0,
        }


class TestPlainData:
    @pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["is"])
    def test_problems_are_those_of_the_case(self, case: Json) -> None:
        found = refused(case["data"])
        assert [[str(one.place), one.check, one.message] for one in found] == case["problems"]

    def test_data_that_contains_itself_ends(self) -> None:
        rule: Json = dict(ZERO)
        rule["where"] = rule
        found = refused({"version": 1, "rules": [rule]})
        assert [str(one.place) for one in found] == [
            f"<dict> rules[0].where.{key}" for key in ("id", "action", "params", "where")
        ]

    @pytest.mark.parametrize(
        "action", ["combine", "zero", *slow(*sorted({*ACTIONS} - {"combine", "zero"}))]
    )
    def test_two_options_of_any_type_are_refused_or_make_a_rule(self, action: str) -> None:
        base = {"id": "it", "action": action, "params": "*", "method": "upgrad"}
        keys = [info.alias or name for name, info in ACTIONS[action].model_fields.items()]
        values: tuple[object, ...] = ([["seg"]], {"seg": 0})
        rules = [
            {**base, first: one, second: other}
            for first, second in combinations(keys, 2)
            for one, other in product(values, repeat=2)
        ]
        for rule in rules:
            found = schema.Inspection(schema.Built({"version": 1, "rules": [rule]}))
            assert found.rules is None or found.rules.rules


class TestBuiltInPython:
    def test_a_list_of_rules_loads(self) -> None:
        rules = [
            ACTIONS["zero"].model_validate(ZERO),
            ACTIONS["scale"].model_validate(
                {"id": "two", "action": "scale", "params": "*", "factor": 2}
            ),
        ]
        found = gradsurgeon.load(rules)
        assert found.rules == tuple(rules)
        assert str(found.place("two")) == "<python> rules[1].id"

    def test_ids_must_differ(self) -> None:
        rule = ACTIONS["zero"].model_validate(ZERO)
        (problem,) = refused([rule, rule])
        assert problem.concise().startswith(
            "<python> rules[1].id: error: the id `one` is used twice, first at <python> rules[0].id"
        )

    def test_no_rules_are_refused(self) -> None:
        (problem,) = refused([])
        assert (str(problem.place), problem.check) == ("<python>", "no-rules")

    @pytest.mark.parametrize("action", sorted(ACTIONS))
    def test_every_example_is_a_rule(self, action: str) -> None:
        # What these do is not to be seen on one gradient.
        unseen = (
            "capture",
            "freeze",
            "check-update",
            "check-loop",
            "check-structure",
            "check-ranks",
        )
        assert ACTIONS[action].EXAMPLES or action in unseen
        for example in ACTIONS[action].EXAMPLES:
            options = {"id": "a", "action": action, "params": "*", **example.options}
            (rule,) = gradsurgeon.load({"version": 1, "rules": [options]}).rules
            assert type(rule) is ACTIONS[action]

    def test_rules_cannot_be_changed(self) -> None:
        rule: Rule = ACTIONS["zero"].model_validate(ZERO)
        with pytest.raises(ValidationError, match="frozen"):
            rule.id = "other"


class TestRequires:
    @pytest.mark.parametrize(
        ("requirement", "met"),
        [
            (">=0.1", True),
            (">= 0.1.0", True),
            (">=0.1.1", False),
            (">=1", False),
            ("==0.1", None),
            (">=0.1, <0.3", None),
            ("~=0.1", None),
            ("0.1", None),
            (">=0.1.dev0", None),
            pytest.param(">=" + "9" * 5000, None, id="endless"),
        ],
    )
    def test_the_least_version(self, requirement: str, met: bool | None) -> None:
        checks = {True: [], False: ["unmet-requirement"], None: ["bad-value"]}
        rules = [{"id": "a", "action": "zero", "params": "*"}]
        found = schema.Inspection(
            schema.Built({"version": 1, "requires": requirement, "rules": rules})
        )
        assert [problem.check for problem in found.problems] == checks[met]


class TestProblems:
    def test_the_error_shows_everything_at_once(self) -> None:
        with pytest.raises(RuleFileError) as caught:
            gradsurgeon.load(
                "version: 1\nrules:\n- {id: a, action: zer, params: '*'}\n- {id: b, action: zero, params: '*', no: 1}\n"
            )
        assert str(caught.value) == (
            "2 problems in the rules\n"
            "<text>:3:19: error: unknown action `zer` [unknown-action]\n"
            "     3 | - {id: a, action: zer, params: '*'}\n"
            "       |                   ^^^\n"
            f"       = did you mean `zero`? known: {', '.join(ACTIONS)}\n"
            "<text>:4:38: error: unknown key `no` [unknown-key]\n"
            "     4 | - {id: b, action: zero, params: '*', no: 1}\n"
            "       |                                      ^^\n"
            f"       = known: {', '.join(keys_of(ACTIONS['zero']))}"
        )

    @singly(
        action=sorted(ACTIONS), value=[None, True, 3, 2.5, "x", [], [3], {}, {"a": 1}, float("nan")]
    )
    def test_any_value_of_any_option_is_judged(self, action: str, value: object) -> None:
        """No option may crash the reader, and a refusal names the rule and its place."""
        for option in ACTIONS[action].model_fields:
            rule = {"id": "a", "action": action, "params": "*", option: value}
            found = schema.Inspection(schema.Built({"version": 1, "rules": [rule]}))
            assert (found.rules is None) == bool(found.problems)
            assert all(str(p.place).startswith("<dict> rules[0]") for p in found.problems)

    def test_a_list_of_other_things_is_told_what_it_lacks(self) -> None:
        items: Any = [gradsurgeon.Zero(id="a", params=("*",)), ZERO]
        with pytest.raises(TypeError) as caught:
            gradsurgeon.load(items)
        assert str(caught.value) == (
            "rules are a path, a text, a RuleSet, a list of rules built in Python alone, or the whole file as a dict "
            '{"version": 1, "rules": [...]}, not list'
        )

    def test_other_types_are_told_what_rules_are(self) -> None:
        rules: Any = 3
        with pytest.raises(TypeError, match=r"rules are a path, a text.*, not int$"):
            gradsurgeon.load(rules)
