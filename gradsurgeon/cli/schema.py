"""``gradsurgeon schema``: the JSON Schema (draft 2020-12) of rule files, for editors."""

import argparse
import json
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
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gradsurgeon rules",
        "description": f"Rules for gradients, as gradsurgeon {VERSION} reads them.",
        "type": "object",
        "properties": {
            "version": {"const": FORMAT, "description": "Version of the rule language."},
            "requires": {
                "type": "string",
                "description": 'Releases of gradsurgeon that may read the file, such as ">=0.1".',
            },
            "include": {
                "type": "array",
                "description": "Packs, as gradsurgeon:NAME@N, and files in the folder of this one or "
                "below. Their rules come first.",
                "minItems": 1,
                "items": {
                    "anyOf": [
                        {"enum": [f"{PREFIX}{spec}" for spec in published()]},
                        {"type": "string", "minLength": 1, "pattern": _RELATIVE},
                    ]
                },
            },
            "rules": {
                "type": "array",
                "description": "The rules; within one point they act in this order.",
                "minItems": 1,
                "items": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in rules]},
            },
        },
        "required": ["version"],
        "anyOf": [{"required": ["rules"]}, {"required": ["include"]}],
        "additionalProperties": False,
        "$defs": rules,
    }


def rule_schema(rule: type[Rule]) -> dict[str, Any]:
    schema = rule.model_json_schema()
    definitions = schema.pop("$defs", {})
    given = {key: _simple(value, definitions) for key, value in schema["properties"].items()}
    summary = (rule.__doc__ or "").partition("\n")[0]
    unknown: set[str] = {kind for kind in TARGETS if kind not in rule.targets}
    if rule.takes_at:
        default = {} if rule.needs_at else {"default": rule.points[0]}
        at = {"enum": list(rule.points), "description": given["at"]["description"], **default}
        given["at"] = at
    else:
        unknown.add("at")
    given["id"]["patternErrorMessage"] = _ID
    # A list of words, which editors can offer, or a path.
    path = {"type": "string", "pattern": _TENSOR_PATH}
    given["tensor"] = {**given["tensor"], "anyOf": [{"enum": _TENSORS}, path]}
    # Editors offer the keys in this order.
    given["action"] = {"const": rule.name(), "description": summary}
    properties = {"action": given["action"], **given}
    needed = [key for key in schema["required"] if key != "id"]
    return {
        "title": rule.name(),
        "description": summary,
        "type": "object",
        "properties": {key: one for key, one in properties.items() if key not in unknown},
        "required": ["id", "action", *needed, *(rule.targets if len(rule.targets) == 1 else ())],
        "additionalProperties": False,
        **_together(rule),
    }


def _together(rule: type[Rule]) -> dict[str, Any]:
    needs: dict[str, list[str]] = {}
    if "modules" in rule.targets:
        needs["modules"] = ["tensor"]
    if rule.needs_at:
        needs["params"] = ["at"]
    for target, option in rule.needs.items():
        needs[target] = [*needs.get(target, ()), option]
    conditions: dict[str, Any] = {}
    if len(rule.targets) > 1:
        # `oneOf` would be shorter, but editors then show neither the line nor the reason.
        conditions["allOf"] = [{"anyOf": [{"required": [kind]} for kind in rule.targets]}]
        conditions["dependentSchemas"] = {
            kind: {"properties": dict.fromkeys(rule.targets[index:], False)}
            for index, kind in enumerate(rule.targets[:-1], start=1)
        }
    if needs:
        conditions["dependentRequired"] = needs
    if rule.either:
        conditions["anyOf"] = [{"required": [key]} for key in rule.either]
    return conditions


def _simple(value: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references written out, and without parts that editors misread.

    A rule file must not hold a key without a value, so `null` is no choice. A title derived from the name of a
    key would hide the key in the list of completions.
    """
    if isinstance(value, list):
        return [_simple(one, definitions) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        target = definitions[value["$ref"].rpartition("/")[2]]
        value = {**target, **{key: one for key, one in value.items() if key != "$ref"}}
    value = {
        key: _simple(one, definitions)
        for key, one in value.items()
        if not (key == "title" and isinstance(one, str))
        and not (key == "default" and (one is None or one == [] or isinstance(one, dict)))
    }
    choices = value.pop("anyOf", [])
    kept = [choice for choice in choices if choice != {"type": "null"}]
    if len(kept) == 1:
        return {**kept[0], **value}
    # The schema of patterns is a choice itself, inside the choice between patterns and nothing.
    kept = [one for choice in kept for one in choice.get("anyOf", [choice])]
    return {"anyOf": kept, **value} if kept else value
