"""``gradsurgeon schema``: the JSON Schema (draft 2020-12) of rule files, for editors."""

import argparse
import json
from collections.abc import Iterable
from typing import Any

from gradsurgeon.actions import ACTIONS, TARGETS, Rule
from gradsurgeon.language.packs import PREFIX, published
from gradsurgeon.language.schema import FORMAT, VERSION


def add_options(parser: argparse.ArgumentParser) -> None:
    del parser  # there are none


def run(arguments: argparse.Namespace) -> int:
    del arguments
    print(json.dumps(document_schema(), indent=2, ensure_ascii=False))
    return 0


# A path that is neither absolute nor a pack that does not exist.
_RELATIVE = r"^(?!gradsurgeon:|/|[A-Za-z]:|.*\\).+$"

# Editors show this text instead of the pattern; validators ignore the keyword.
_ID = "An id is small letters and digits, joined by single hyphens, such as `no-bias`."
_TENSORS = ["output", "input", "output.grad", "input.grad", "grad", "value", "update"]
_TENSOR_PATH = r"^(output|input)(\[[0-9]+\]|\.[A-Za-z_]\w*)+$"


def document_schema() -> dict[str, Any]:
    rules = {name: rule_schema(rule) for name, rule in ACTIONS.items()}
    requires = {
        "type": "string",
        "description": 'Releases of gradsurgeon that may read the file, such as ">=0.1".',
    }
    packs = {"enum": [f"{PREFIX}{spec}" for spec in published()]}
    file = {"type": "string", "minLength": 1, "pattern": _RELATIVE}
    include = {
        "type": "array",
        "description": "Packs, as gradsurgeon:NAME@N, and files in the folder of this one or "
        "below. Their rules come first.",
        "minItems": 1,
        "items": {"anyOf": [packs, file]},
    }
    references = [{"$ref": f"#/$defs/{name}"} for name in rules]
    list_of_rules = {
        "type": "array",
        "description": "The rules; within one point they act in this order.",
        "minItems": 1,
        "items": {"oneOf": references},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gradsurgeon rules",
        "description": f"Rules for gradients, as gradsurgeon {VERSION} reads them.",
        "type": "object",
        "properties": {
            "version": {"const": FORMAT, "description": "Version of the rule language."},
            "requires": requires,
            "include": include,
            "rules": list_of_rules,
        },
        "required": ["version"],
        "anyOf": _each_required(("rules", "include")),
        "additionalProperties": False,
        "$defs": rules,
    }


def rule_schema(rule: type[Rule]) -> dict[str, Any]:
    schema = rule.model_json_schema()
    definitions = schema.pop("$defs", {})
    summary = summary_of(rule)
    # Editors offer the keys in this order.
    options: dict[str, Any] = {"action": {"const": rule.name(), "description": summary}}
    for key, option in schema["properties"].items():
        if key != "action" and _has_option(rule, key):
            options[key] = _simple(option, definitions)
    options["id"]["patternErrorMessage"] = _ID
    # A list of words, which editors can offer, or a path.
    path = {"type": "string", "pattern": _TENSOR_PATH}
    options["tensor"]["anyOf"] = [{"enum": _TENSORS}, path]
    if rule.takes_at:
        at = {"enum": list(rule.points), "description": options["at"]["description"]}
        if not rule.needs_at:
            at["default"] = rule.points[0]
        options["at"] = at
    required = ["id", "action"]
    required += [key for key in schema["required"] if key != "id"]
    if len(rule.targets) == 1:
        required += rule.targets
    return {
        "title": rule.name(),
        "description": summary,
        "type": "object",
        "properties": options,
        "required": required,
        "additionalProperties": False,
        **_conditions(rule),
    }


def summary_of(rule: type[Rule]) -> str:
    return (rule.__doc__ or "").partition("\n")[0]


def _has_option(rule: type[Rule], key: str) -> bool:
    if key in TARGETS:
        return key in rule.targets
    if key == "at":
        return rule.takes_at
    return True


def _conditions(rule: type[Rule]) -> dict[str, Any]:
    """Return the parts of a schema that say which options need or exclude each other."""
    needs: dict[str, list[str]] = {}
    if "modules" in rule.targets:
        needs["modules"] = ["tensor"]
    for target, option in rule.needs.items():
        needs.setdefault(target, []).append(option)
    conditions: dict[str, Any] = {}
    if len(rule.targets) > 1:
        # `oneOf` would be shorter, but editors then show neither the line nor the reason.
        conditions["allOf"] = [{"anyOf": _each_required(rule.targets)}]
        exclusions: dict[str, dict[str, Any]] = {}
        for number, target in enumerate(rule.targets[:-1], 1):
            others = rule.targets[number:]
            exclusions[target] = {"properties": dict.fromkeys(others, False)}
        if rule.needs_at:
            # A rule on weights has `tensor` in its place. The pattern adds no key to those of the rule.
            of_weights = {
                "required": ["tensor"],
                "patternProperties": {"^tensor$": {"enum": list(rule.of_weights)}},
            }
            exclusions["params"]["anyOf"] = [{"required": ["at"]}, of_weights]
        conditions["dependentSchemas"] = exclusions
    if needs:
        conditions["dependentRequired"] = needs
    if rule.either:
        conditions["anyOf"] = _each_required(rule.either)
    return conditions


def _each_required(keys: Iterable[str]) -> list[dict[str, list[str]]]:
    return [{"required": [key]} for key in keys]


def _simple(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references written out, and without parts that editors misread.

    A rule file must not hold a key without a value, so `null` is no choice.
    """
    if isinstance(part, list):
        return [_simple(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        part = dict(part)
        name = part.pop("$ref").rpartition("/")[2]
        part = {**definitions[name], **part}
    simple = {}
    for key, value in part.items():
        if not _misleads(key, value):
            simple[key] = _simple(value, definitions)
    choices = [choice for choice in simple.pop("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        return {**choices[0], **simple}
    # The schema of patterns is a choice itself, inside the choice between patterns and nothing.
    flat: list[Any] = []
    for choice in choices:
        flat += choice.get("anyOf", [choice])
    if flat:
        return {"anyOf": flat, **simple}
    return simple


def _misleads(key: str, value: object) -> bool:
    if key == "title":
        # A title derived from the name of a key would hide the key in the list of completions.
        return isinstance(value, str)
    if key == "default":
        return isinstance(value, dict) or value in (None, [])
    return False
