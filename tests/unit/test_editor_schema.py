"""The JSON Schema of rule files, by a validator: it takes what the reader takes, and refuses harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ranks import Json

from gradsurgeon.actions import ACTIONS, TARGETS, check_rule
from gradsurgeon.actions._base import POINTS
from gradsurgeon.cli.review import lint
from gradsurgeon.cli.schema import document_schema, rule_schema
from gradsurgeon.language import source

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases"
GOOD = sorted([*(ROOT / "rules").glob("*.yaml"), *CASES.glob("*/good/*.yaml")])
CHECK = Draft202012Validator(document_schema())
RULE = {"id": "a", "action": "zero", "params": "*"}


def wrong(**changes: object) -> list[str]:
    """Return the paths of what is wrong with a rule after changes; ``None`` takes a key away."""
    rule = {key: value for key, value in {**RULE, **changes}.items() if value is not None}
    return [one.json_path for one in CHECK.iter_errors({"version": 1, "rules": [rule]})]


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(document_schema())


@pytest.mark.parametrize("file", GOOD, ids=lambda file: f"{file.parent.parent.name}-{file.stem}")
def test_it_takes_what_the_reader_takes(file: Path) -> None:
    problems = lint(str(file))
    assert not [one for one in problems if one.severity == "error"]
    assert not list(CHECK.iter_errors(source.read(file).data))


def known_rules() -> dict[str, list[Json]]:
    """Return rules of each action, of its examples and of the good files."""
    found: dict[str, list[Json]] = {}
    for name, action in ACTIONS.items():
        given = [example.options for example in action.EXAMPLES]
        found[name] = [{"id": "a", "action": name, "params": "*", **options} for options in given]
    for file in GOOD:
        document: Any = source.read(file).data
        for rule in document.get("rules", []):
            found[rule["action"]].append(rule)
    return found


KNOWN = known_rules()
VALUES = {key: value for rules in KNOWN.values() for rule in rules for key, value in rule.items()}
TENSORS = ["grad", "output", "input.grad", "value", "update", "output[0].grad", "grad[0]"]


def near(rule: Json) -> Iterator[Json]:
    """Yield a rule without each of its keys, with each key of another, and with every kind of target."""
    for key in rule:
        yield {other: value for other, value in rule.items() if other != key}
    for key, value in {**VALUES, "nope": 1, "action": rule["action"]}.items():
        yield {**rule, key: value}
    for point in POINTS:
        yield {**rule, "at": point}
    bare = {key: value for key, value in rule.items() if key not in (*TARGETS, "tensor", "at")}
    for kind in TARGETS:
        yield {**bare, kind: "*"}
        for tensor in TENSORS:
            yield {**bare, kind: "*", "tensor": tensor}


@pytest.mark.parametrize("action", ACTIONS)
def test_it_takes_and_refuses_keys_as_the_reader_does(action: str) -> None:
    schema = Draft202012Validator(rule_schema(ACTIONS[action]))
    for rule in near(KNOWN[action][-1]):
        flaws = check_rule(rule)[1]
        keys = {flaw.at for flaw in flaws if flaw.check != "bad-value"}
        # Of values, and of what a method asks for, the reader knows more.
        keys -= {("c",), ("alpha",)}
        is_taken = schema.is_valid(rule)
        assert is_taken or flaws, rule
        assert not is_taken or not keys, rule


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "No Bias"},
        {"action": "explode"},
        {"params": 3},
        {"params": []},
        {"action": "clip-norm", "max_norm": -1.0},
        {"factor": 1},
        {"action": "scale"},
        {"action": "clamp", "at": "step"},
        {"action": "nan-trap", "then": "explode"},
        {"params": None, "modules": "*"},
    ],
)
def test_it_refuses_what_the_reader_refuses(changes: dict[str, object], tmp_path: Path) -> None:
    assert wrong(**changes)
    rule = {key: value for key, value in {**RULE, **changes}.items() if value is not None}
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "rules": [rule]}), encoding="utf-8")
    assert "error" in {one.severity for one in lint(str(file))}
