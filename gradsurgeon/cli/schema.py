"""``gradsurgeon schema``: the JSON Schema (draft 2020-12) of rule files, for editors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gradsurgeon.actions import ACTIONS, Rule
from gradsurgeon.schema import FORMAT, VERSION

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    del arguments
    print(json.dumps(document_schema(), indent=2, ensure_ascii=False))
    return 0


def document_schema() -> dict[str, Any]:
    """Return the schema of a whole file: one branch per action, told apart by `action`."""
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
                "pattern": r"^\s*(>=|<=|==|!=|>|<)\s*\d+(\.\d+){0,3}\s*"
                r"(,\s*(>=|<=|==|!=|>|<)\s*\d+(\.\d+){0,3}\s*)*$",
            },
            "rules": {
                "type": "array",
                "description": "The rules; within one point they act in this order.",
                "minItems": 1,
                "items": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in rules]},
            },
        },
        "required": ["version", "rules"],
        "additionalProperties": False,
        "$defs": rules,
    }


def rule_schema(rule: type[Rule]) -> dict[str, Any]:
    """Return the branch of one action."""
    found = rule.model_json_schema()
    definitions = found.pop("$defs", {})
    properties = {
        name: _simple(value, definitions)
        for name, value in found["properties"].items()
        if name != "at" or rule.takes_at
    }
    properties["action"] = {
        "const": rule.name(),
        "description": (rule.__doc__ or "").partition("\n")[0],
    }
    if rule.takes_at:
        default = {} if rule.needs_at else {"default": rule.points[0]}
        properties["at"] = {
            "enum": list(rule.points),
            "description": properties["at"]["description"],
            **default,
        }
    branch: dict[str, Any] = {
        "title": rule.name(),
        "description": properties["action"]["description"],
        "type": "object",
        "properties": dict(sorted(properties.items(), key=lambda item: item[0] != "action")),
        "required": ["id", "action", *(key for key in found["required"] if key != "id")],
        "additionalProperties": False,
    }
    if rule.needs_at:
        branch["required"].append("at")
    # Keys of which one at least must be given: no single field can say so.
    if either := rule.either:
        branch["anyOf"] = [{"required": [key]} for key in either]
    return branch


def _simple(value: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references written out and without what editors misread.

    A key without a value is refused in a file, so that `null` is no choice; and a title derived from
    the name of a key hides the key in the list of completions.
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
    choices = value.get("anyOf", [])
    kept = [choice for choice in choices if choice != {"type": "null"}]
    if choices and len(kept) == 1:
        del value["anyOf"]
        return {**kept[0], **value}
    return value
