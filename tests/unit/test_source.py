"""Reading rule files: what YAML means here, where it stands, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradsurgeon.language import source
from gradsurgeon.language.source import Document, parse

# What each text means, or where it is refused: values, syntax errors with their remedy, problems after which reading goes on,
# and the places of values, keys and missing keys in RULES.
CASES = json.loads(Path(__file__).parents[1].joinpath("cases", "source.json").read_text())
LOADERS = [pytest.param(yaml.SafeLoader, id="pure")]
if hasattr(yaml, "CSafeLoader"):
    LOADERS.append(pytest.param(yaml.CSafeLoader, id="libyaml"))


@pytest.fixture(autouse=True, params=LOADERS)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(source, "_LOADER", request.param)
    return request.param


def found(document: Document) -> list[tuple[int, int, str]]:
    return [(p.place.line, p.place.col, p.check) for p in document.problems]


# -- values: YAML 1.2 core ------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), CASES["values"])
def test_scalars_are_yaml_1_2_core(text: str, value: object) -> None:
    document = parse(f"a: {text}\n")
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)
    assert not [p for p in document.problems if p.severity == "error"]


def test_nan_is_a_number() -> None:
    data = parse("a: [.nan, .NaN, .NAN]").data
    assert isinstance(data, dict)
    assert all(math.isnan(value) for value in data["a"])


def test_block_text_and_nesting() -> None:
    document = parse("a:\n  - b: |\n      x\n      y\n    c: [1, {d: 2}]\n  - >-\n    p\n    q\n")
    assert document.data == {"a": [{"b": "x\ny\n", "c": [1, {"d": 2}]}, "p q"]}
    assert document.problems == ()


@pytest.mark.parametrize("text", ["'no'", '"010"', "norm-log", "10", "0.5", "x:30", "1-2"])
def test_no_warning_where_both_agree(text: str) -> None:
    assert parse(f"a: {text}").problems == ()


# -- pitfalls: each refused at its place ----------------------------------------------------------


@pytest.mark.parametrize(("text", "line", "col", "hint"), CASES["syntax"])
def test_syntax_errors_have_place_and_remedy(text: str, line: int, col: int, hint: str) -> None:
    document = parse(text, "rules.yaml")
    (problem,) = document.problems
    assert (problem.place.line, problem.check) == (line, "yaml-syntax")
    if "escape" not in problem.message:  # PyYAML in Python marks the quote
        assert problem.place.col == col
    assert problem.message.startswith("YAML syntax: ")
    assert hint in problem.hint
    assert document.data is None
    assert document.place(("rules", 0)).line == 1


@pytest.mark.parametrize(("text", "problems", "data"), CASES["goes_on"])
def test_reading_goes_on_after_a_problem(
    text: str, problems: list[list[object]], data: object
) -> None:
    document = parse(text)
    assert [[*problem] for problem in found(document)] == problems
    assert document.data == data


def test_every_problem_is_reported_in_one_pass() -> None:
    text = "a: 1\na: 2\n<<: {}\nb: !x 1\n1: 2\nc: no\nd: {e}\n---\n"
    checks = [check for _, _, check in found(parse(text))]
    assert checks == [
        "duplicate-key",
        "merge-key",
        "yaml-tag",
        "key-type",
        "several-documents",
    ]


def test_messages_say_what_was_found() -> None:
    messages = [p.message for p in parse("a: 1\nb: 1\na: 2\n1: x\nc: !y 1\n").problems]
    assert messages == [
        "duplicate key `a` (first on line 1)",
        "keys must be text, this one is a number",
        "the YAML tag !y is not allowed",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_an_empty_file_is_an_error(text: str) -> None:
    document = parse(text)
    assert found(document) == [(1, 1, "empty-file")]
    assert document.data is None


# -- places ---------------------------------------------------------------------------------------

RULES = """\
version: 1
rules:
  - id: a
    params: ["x", yy]
    steps: {from: 0,
            to: 5}
  - id: b
    min:
"""


@pytest.mark.parametrize(("method", "path", "line", "col", "width"), CASES["places"])
def test_places_of_values_of_keys_and_of_missing_keys(
    method: str, path: list[str | int], line: int, col: int, width: int
) -> None:
    place = getattr(parse(RULES, "f.yaml"), method)(tuple(path))
    assert (place.file, place.line, place.col, place.width) == ("f.yaml", line, col, width)
    assert place.line_text == RULES.split("\n")[line - 1]


def test_a_missing_key_of_an_empty_mapping_is_placed_at_its_brace() -> None:
    place = parse("rules: [{}]\n").missing_place(("rules", 0))
    assert (place.line, place.col, place.width) == (1, 9, 2)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_columns_are_code_points(end: str, bom: str) -> None:
    lines = ["# 漢字 \U0001f600", "名: {a: 漢字\U0001f600, b: zz}", "c: &k x", "d: *k", ""]
    document = parse(bom + end.join(lines), "f")
    assert document.data == {"名": {"a": "漢字\U0001f600", "b": "zz"}, "c": "x", "d": "x"}
    place = document.place(("名", "b"))
    assert (place.line, place.col, place.width, place.line_text) == (2, 16, 2, lines[1])
    place = document.place(("名", "a"))
    assert (place.line, place.col, place.width) == (2, 8, 3)
    assert document.place(("d",)).line == 3, "an alias is placed at its anchor"


def test_a_text_over_several_lines_is_as_wide_as_its_first() -> None:
    place = parse('a: "xx\n  yy"\n').place(("a",))
    assert (place.line, place.col, place.width) == (1, 4, 3)
