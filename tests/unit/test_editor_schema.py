"""The JSON Schema of rule files, by a validator: it takes what the reader takes, and refuses harm."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from gradsurgeon.cli.review import lint
from gradsurgeon.cli.schema import document_schema
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
        {"nope": 1},
        {"action": "nan-trap", "then": "explode"},
    ],
)
def test_it_refuses_what_the_reader_refuses(changes: dict[str, object], tmp_path: Path) -> None:
    assert wrong(**changes)
    rule = {key: value for key, value in {**RULE, **changes}.items() if value is not None}
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "rules": [rule]}), encoding="utf-8")
    assert "error" in {one.severity for one in lint(str(file))}
