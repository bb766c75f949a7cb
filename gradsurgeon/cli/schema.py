"""``gradsurgeon schema``: the JSON Schema (draft 2020-12) of rule files, for editors."""

import argparse
import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import NullableSchema, WithDefaultSchema

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
    schema = rule.model_json_schema(schema_generator=_Generator)
    given = _inlined(schema["properties"], schema.get("$defs", {}))
    summary = (rule.__doc__ or "").partition("\n")[0]
    unknown: set[str] = {kind for kind in TARGETS if kind not in rule.targets}
    if rule.takes_at:
        default = {} if rule.needs_at else {"default": rule.points[0]}
        at = {"enum": list(rule.points), "description": given["at"]["description"], **default}
        given["at"] = at
    else:
        unknown.add("at")
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
    }


class _Generator(GenerateJsonSchema):
    """Leaves out what editors misread.

    A rule file must not hold a key without a value, so `null` is no choice. A title derived from the name of a
    key would hide the key in the list of completions.
    """

    def nullable_schema(self, schema: NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        simple = super().default_schema(schema)
        default = simple.get("default")
        if default in (None, []) or isinstance(default, dict):
            simple.pop("default", None)
        return simple


def _inlined(value: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references written out."""
    if isinstance(value, list):
        return [_inlined(one, definitions) for one in value]
    if not isinstance(value, dict):
        return value
    value = dict(value)
    if "$ref" in value:
        target = definitions[value.pop("$ref").rpartition("/")[2]]
        value = {**target, **value}
        value.pop("title", None)
    return {key: _inlined(one, definitions) for key, one in value.items()}
