"""Rules as text, as plain data and built in Python: what is accepted, what is refused, and where."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from pairs import singly, slow
from pydantic import BaseModel, ValidationError
from ranks import Json

import gradsurgeon
from gradsurgeon.actions import ACTIONS, Rule, Steps, Where
from gradsurgeon.actions._options import keys_of
from gradsurgeon.errors import Problem, RuleFileError
from gradsurgeon.language import schema, source
from gradsurgeon.language.schema._document import meets

ZERO = {"id": "one", "action": "zero", "params": "*"}


NO_FILE_COULD_HOLD: list[tuple[dict[Any, Any], str, str]] = [
    ({}, "<dict>", "missing-key"),
    ({"version": 1, "rules": []}, "<dict> rules", "bad-value"),
    ({"version": 1, "rules": {"a"}}, "<dict> rules", "wrong-type"),
    ({"version": 1, "rules": [{**ZERO, 3: 4}]}, "<dict> rules[0]", "key-type"),
    (
        {"version": 1, "rules": [{**ZERO, "steps": {3: 4}}]},
        "<dict> rules[0].steps",
        "key-type",
    ),
    ({"version": 1, 3: 4, "rules": [ZERO]}, "<dict>", "key-type"),
    (
        {"version": 1, "rules": [{**ZERO, "params": b"x"}]},
        "<dict> rules[0].params",
        "wrong-type",
    ),
]


def refused(rules: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(RuleFileError) as caught:
        gradsurgeon.load(rules)
    return [(str(p.place), p.check, p.message) for p in caught.value.problems]


def of_text(text: str) -> list[Problem]:
    return list(schema.inspect(source.parse(text, "r.yaml")).problems)


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

    def test_file_order_and_the_place_of_each_id(self) -> None:
        text = 'version: 1\nrules:\n- {id: b, action: zero, params: "*"}\n- {action: zero, id: a, params: x}\n'
        found = schema.validate(source.parse(text, "r.yaml"))
        assert [rule.id for rule in found.rules] == ["b", "a"]
        assert str(found.place("b")) == "r.yaml:3:8"
        assert str(found.place("a")) == "r.yaml:4:22"
        assert (found.file, found.text) == ("r.yaml", text)


class TestPlainData:
    def test_places_are_paths(self) -> None:
        clamp = {
            "id": "two",
            "action": "clamp",
            "params": ("a",),
            "at": "step",
            "min": "1",
            "mx": 2,
        }
        data = {"version": 1, "rules": [ZERO, ZERO, clamp]}
        assert refused(data) == [
            (
                "<dict> rules[2].min",
                "wrong-type",
                '`min` must be a number, found the text "1"',
            ),
            ("<dict> rules[2].mx", "unknown-key", "unknown key `mx`"),
            (
                "<dict> rules[1].id",
                "duplicate-rule-id",
                "the id `one` is used twice, first at <dict> rules[0].id",
            ),
        ]

    def test_items_of_lists_and_of_mappings_have_paths(self) -> None:
        rule = {**ZERO, "params": ["*", "a|b"], "where": {"numel": {"min": -1}}}
        assert refused({"version": 1, "rules": [rule]}) == [
            (
                "<dict> rules[0].params[1]",
                "bad-pattern",
                "`|` has no meaning in a glob pattern",
            ),
            (
                "<dict> rules[0].where.numel.min",
                "bad-value",
                "`min` must be greater than or equal to 0, found -1",
            ),
        ]

    @pytest.mark.parametrize(("data", "place", "check"), NO_FILE_COULD_HOLD)
    def test_what_no_file_could_hold(self, data: dict[Any, Any], place: str, check: str) -> None:
        assert refused(data)[0][:2] == (place, check)

    def test_other_types_are_named(self) -> None:
        rule = {**ZERO, "action": "scale", "factor": 1j}
        ((_, _, message),) = refused({"version": 1, "rules": [rule]})
        assert message == "`factor` must be a number, found 1j"

    def test_data_that_contains_itself_ends(self) -> None:
        rule: Json = dict(ZERO)
        rule["where"] = rule
        places = [place for place, _, _ in refused({"version": 1, "rules": [rule]})]
        assert places == [
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
            found = schema.inspect(schema.Built({"version": 1, "rules": [rule]}))
            assert found.rules is None or found.rules.rules

    @pytest.mark.parametrize("key", ["action", "Action", "actio", "type"])
    def test_an_action_without_a_name_is_refused(self, key: str) -> None:
        assert refused({"version": 1, "rules": [{"id": "it", key: None}]})


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
        assert refused([rule, rule]) == [
            (
                "<python> rules[1].id",
                "duplicate-rule-id",
                "the id `one` is used twice, first at <python> rules[0].id",
            )
        ]

    def test_no_rules_are_refused(self) -> None:
        assert refused([]) == [("<python>", "no-rules", "there are no rules")]

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

    @pytest.mark.parametrize(
        ("kind", "given", "said"),
        [
            (
                ACTIONS["clamp"],
                {"id": "a", "params": "*", "at": "step", "min": 2, "max": 1},
                r"min \(2\) is greater than max \(1\)",
            ),
            (Steps, {"from": 5, "to": 5}, r"`to` \(5\) is not after `from` \(5\)"),
            (Where, {"numel": {"min": 9, "max": 1}}, r"min \(9\) is greater than max \(1\)"),
        ],
    )
    def test_crossed_bounds_are_refused(
        self, kind: type[BaseModel], given: Json, said: str
    ) -> None:
        with pytest.raises(ValidationError, match=said):
            kind.model_validate(given)

    def test_rules_cannot_be_changed(self) -> None:
        rule: Rule = ACTIONS["zero"].model_validate(ZERO)
        with pytest.raises(ValidationError, match="frozen"):
            rule.id = "other"


class TestRequires:
    @pytest.mark.parametrize(
        ("requirement", "met"),
        [
            (">=0.1", True),
            ("==0.1", True),
            ("<0.1", False),
            ("<=0.1", True),
            (">0.1", False),
            ("!=0.1.0", False),
            (">=0.1, <0.3", True),
            (">=0.2, <0.3", False),
            ("~=0.1", None),
            ("0.1", None),
            (">=0.1.dev0", None),
            pytest.param(">=" + "9" * 5000, None, id="endless"),
        ],
    )
    def test_comparisons(self, requirement: str, met: bool | None) -> None:
        assert meets("0.1.0", requirement) is met

    def test_an_unmet_requirement_stops_everything_else(self) -> None:
        text = 'requires: ">=99"\nversion: [2]\nrulez: 3\nrules:\n- {id: no}\n- {id: no}\n'
        (problem,) = of_text(text)
        assert (problem.place.line, problem.place.col, problem.check) == (
            1,
            11,
            "unmet-requirement",
        )
        assert problem.message == f"these rules require gradsurgeon >=99, this is {schema.VERSION}"

    def test_another_version_stops_everything_else(self) -> None:
        (problem,) = of_text("version: 2\nrulez: 3\n")
        assert (problem.place.line, problem.place.col, problem.check) == (1, 10, "bad-version")

    def test_text_that_is_no_yaml_shows_that_only(self) -> None:
        problems = of_text("version: 2\nrules: [\n")
        assert [problem.check for problem in problems] == ["yaml-syntax"]


class TestProblems:
    def test_problems_come_in_the_order_of_the_file(self) -> None:
        text = (
            "version: 1\nrules:\n- {id: a, action: zero, params: '*', steps: {to: 0}, x: 1}\n"
            "- {id: a, min: 1, min: 2, action: clamp, params: 3, at: step}\n"
        )
        assert [(p.place.line, p.place.col, p.check) for p in of_text(text)] == [
            (3, 50, "bad-value"),
            (3, 54, "unknown-key"),
            (4, 8, "duplicate-rule-id"),
            (4, 19, "duplicate-key"),
            (4, 50, "wrong-type"),
        ]

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

    def test_nothing_of_a_file_reaches_the_terminal_raw(self) -> None:
        text = (
            'version: 1\nrules:\n- {id: "a\\e[2J", action: zero, params: "\\x9b|", "k\\u202e": 1,'
            ' where: {dtype: "\\e]0;x"}}\n- {id: b, action: "\\a", params: x}\n'
        )
        shown = [form for p in of_text(text) for form in (p.concise(), p.full())]
        assert len(shown) == 10
        assert all(char.isprintable() for form in shown for char in form.replace("\n", ""))
        assert "`a\\x1b[2J` is not a rule id" in shown[0]

    @singly(
        action=sorted(ACTIONS), value=[None, True, 3, 2.5, "x", [], [3], {}, {"a": 1}, float("nan")]
    )
    def test_any_value_of_any_option_is_judged(self, action: str, value: object) -> None:
        """No option may crash the reader, and a refusal names the rule and its place."""
        for option in ACTIONS[action].model_fields:
            rule = {"id": "a", "action": action, "params": "*", option: value}
            found = schema.inspect(schema.Built({"version": 1, "rules": [rule]}))
            assert (found.rules is None) == bool(found.problems)
            assert all(str(p.place).startswith("<dict> rules[0]") for p in found.problems)

    def test_a_list_of_other_things_is_told_what_it_lacks(self) -> None:
        items: Any = [gradsurgeon.Zero(id="a", params=("*",)), ZERO]
        with pytest.raises(TypeError) as caught:
            gradsurgeon.load(items)
        assert str(caught.value) == (
            "a list of rules holds rules built in Python, this one has an item of type dict: pass the whole file "
            'as a dict {"version": 1, "rules": [...]}'
        )

    def test_other_types_are_told_what_rules_are(self) -> None:
        rules: Any = 3
        with pytest.raises(TypeError, match=r"rules are a path, a text.*, not int$"):
            gradsurgeon.load(rules)
