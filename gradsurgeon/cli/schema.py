"""``gradsurgeon schema``: the JSON Schema (draft 2020-12) of rule files, for editors."""

import argparse
import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

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
_TENSOR_PATH = r"^((output|input)(\[[0-9]+\]|\.[A-Za-z_]\w*)+|state\.[A-Za-z_]\w*)$"


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
        "anyOf": [{"required": ["rules"]}, {"required": ["include"]}],
        "additionalProperties": False,
        "$defs": rules,
    }


class _Plain(GenerateJsonSchema):
    """Without titles of keys and `null`, which editors would show and offer. A rule file must not hold a key without a value."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> dict[str, Any]:
        default = schema.get("default")
        if isinstance(default, str | int | float | tuple) and default != ():
            return super().default_schema(schema)
        return self.generate_inner(schema["schema"])


def rule_schema(rule: type[Rule]) -> dict[str, Any]:
    schema = rule.model_json_schema(schema_generator=_Plain)
    definitions = schema.pop("$defs", {})
    summary = summary_of(rule)
    # Editors offer the keys in this order.
    options: dict[str, Any] = {"action": {"const": rule.name(), "description": summary}}
    for key, option in schema["properties"].items():
        if key != "action" and _has_option(rule, key):
            options[key] = _written_out(option, definitions)
    options["id"]["patternErrorMessage"] = _ID
    # A list of words, which editors can offer, or a path.
    path = {"type": "string", "pattern": _TENSOR_PATH}
    options["tensor"] = {
        "anyOf": [{"enum": _TENSORS}, path],
        "description": options["tensor"]["description"],
    }
    if rule.takes_at:
        at = {"enum": list(rule.points), "description": options["at"]["description"]}
        if not rule.needs_at:
            at["default"] = rule.points[0]
        options["at"] = at
    required = ["id", "action"]
    required += [key for key in schema["required"] if key != "id"]
    return {
        "title": rule.name(),
        "description": summary,
        "type": "object",
        "properties": options,
        "required": required,
        "additionalProperties": False,
        # One of the targets. `oneOf` would be stricter, but editors then show neither the line nor the reason.
        "allOf": [{"anyOf": [{"required": [target]} for target in rule.targets]}],
    }


def summary_of(rule: type[Rule]) -> str:
    return (rule.__doc__ or "").partition("\n")[0]


def _has_option(rule: type[Rule], key: str) -> bool:
    if key in TARGETS:
        return key in rule.targets
    if key == "at":
        return rule.takes_at
    return True


def _written_out(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references written out, and without titles."""
    if isinstance(part, list):
        return [_written_out(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    whole = dict(part)
    name = whole.pop("$ref", "").rpartition("/")[2]
    whole = {**definitions.get(name, {}), **whole}
    # The title of a definition would hide the key in the list of completions.
    whole.pop("title", None)
    return {key: _written_out(value, definitions) for key, value in whole.items()}
