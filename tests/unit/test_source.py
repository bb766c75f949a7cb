"""Reading rule files: what YAML means here, where it stands, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from gradsurgeon.language import source
from gradsurgeon.language.source import Document, parse

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

WORDS = """
tRue nUll no on off yes y 1:30 1_000 2026-11-21 nan inf Infinity 0b101 -0x1 1e . = a#b
fc*.bias h.{0..5}.attn.* re:^x$
"""

VALUES: list[tuple[str, object]] = [
    *((text, text) for text in WORDS.split()),
    ("1e-3", 1e-3),
    ("1e3", 1e3),
    ("1.5e10", 1.5e10),
    ("-1e-3", -1e-3),
    ("-.5", -0.5),
    (".5", 0.5),
    ("+.5e1", 5.0),
    ("1.", 1.0),
    ("1E+2", 100.0),
    ("1e999", math.inf),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("+.Inf", math.inf),
    ("0", 0),
    ("-0", 0),
    ("+12", 12),
    ("0x1F", 31),
    ("0o17", 15),
    ("010", 10),
    ("true", True),
    ("True", True),
    ("FALSE", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("NULL", None),
    ("[]", []),
    ("'1e-3'", "1e-3"),
    ('"no"', "no"),
    ("'it''s'", "it's"),
    ('"\\u2028"', "\u2028"),
    ("a # comment", "a"),
    ("\u0661", "\u0661"),  # an Arabic digit is text
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_scalars_are_yaml_1_2_core(text: str, value: object) -> None:
    document = parse(f"a: {text}\n")
    assert document.data == {"a": value}
    assert isinstance(document.data, dict)
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


@pytest.mark.parametrize(
    "text",
    [
        "'no'",
        '"010"',
        "none",
        "fc_1",
        "norm-log",
        "nan-trap",
        "10",
        "0",
        "1.0",
        "0.5",
        "x:30",
        "1-2",
    ],
)
def test_no_warning_where_both_agree(text: str) -> None:
    assert parse(f"a: {text}").problems == ()


# -- pitfalls: each refused at its place ----------------------------------------------------------

HINT_ALIAS = '`*` starts an alias in YAML: quote patterns, e.g. params: "*.weight"'
HINT_LIST = "`[` starts a list in YAML: quote patterns"
HINT_TAB = "YAML does not allow tabs for indentation: use spaces"
HINT_REGEX = "use single quotes for regular expressions"
HINT_ANY = "quote text with special characters, write `key: value` with a blank behind the colon"

SYNTAX: list[tuple[str, int, int, str]] = [
    ("rules:\n  - params: *.weight\n", 2, 13, HINT_ALIAS),
    ("params: **.bias\n", 1, 9, HINT_ALIAS),
    ("params: *\n", 1, 9, HINT_ALIAS),
    ("params: [*.a, b]\n", 1, 10, HINT_ALIAS),
    ("params: [b, *.a]\n", 1, 13, HINT_ALIAS),
    ("params:\n  - *.a\n", 2, 5, HINT_ALIAS),
    ("params: [a-z]*\n", 1, 14, HINT_ALIAS),
    ("params: [0-9].weight\n", 1, 14, HINT_LIST),
    ("params: %x\n", 1, 9, HINT_ANY),
    ("params: @x\n", 1, 9, HINT_ANY),
    ("params: `x`\n", 1, 9, HINT_ANY),
    ("params: ]\n", 1, 9, HINT_ANY),
    ("params: , x\n", 1, 9, HINT_ANY),
    ("params: |x\n", 1, 9, HINT_ANY),
    ("params: &\n", 1, 9, "`&` starts an anchor in YAML"),
    ("params: !e!x 1\n", 1, 9, "`!` starts a tag in YAML"),
    ('params: "re:\\."\n', 1, 13, HINT_REGEX),
    ('params: "re:\\d+"\n', 1, 13, HINT_REGEX),
    ("params: re: ^x$\n", 1, 11, HINT_ANY),
    ("params: a: b\n", 1, 10, HINT_ANY),
    ("rules:\n\t- id: x\n", 2, 1, HINT_TAB),
    ("rules:\n  - id: x\n\t- id: y\n", 3, 1, HINT_TAB),
    ('a: 1\nparams: "abc\nq: 1\n', 2, 9, "close the quote that opens on line 2"),
    ("a: 1\nparams: 'abc\nq: 1\n", 2, 9, "close the quote that opens on line 2"),
    ("a: 1\nparams: 'abc", 2, 9, "close the quote that opens on line 2"),
    ('a: "x\nb: 1\nc: "y"\n', 1, 4, "close the quote that opens on line 1"),
    ("a: 'x\nb: 1\nc: 'y'\n", 1, 4, "close the quote that opens on line 1"),
    ('a: "x\nb: "\\d"\n', 1, 4, "close the quote that opens on line 1"),
    ("a: \"x\nb: '\\d'\n", 1, 4, "close the quote that opens on line 1"),
    ('- {a: 1, b: "x}\n- {a: 2, b: "y"}\n', 1, 13, "close the quote that opens on line 1"),
    ('- {a: 1, b: "x"}\n- {a: 2, b: "y}\n', 2, 13, "close the quote that opens on line 2"),
    ('a: ["x, "y"]\n', 1, 10, "is the quote or the bracket that opens on line 1 closed?"),
    ('a: "x\n  y"\nb: 1\n c: 2\n', 4, 3, HINT_ANY),
    ('params: "a"b\n', 1, 12, HINT_ANY),
    ("a: 1\n b: 2\n", 2, 3, HINT_ANY),
    ("a:1\nb: 2\n", 2, 2, HINT_ANY),
    ("- a\n b: 2\n", 2, 3, HINT_ANY),
    ("a: [b, c\nd: 1\n", 2, 2, "is the quote or the bracket that opens on line 1 closed?"),
    ("a: {b: 1\nd: 1\n", 2, 2, "is the quote or the bracket that opens on line 1 closed?"),
    ("%YAML 2.0\n---\na: 1\n", 1, 1, ""),
    ("a: 1\n...\nb: 2\n", 3, 1, ""),
    ("a: \x00\n", 1, 4, "remove it"),
    ("a: 1\nb: x\x1b[31m\n", 2, 5, "remove it"),
    ("# \ud800\n", 1, 3, "remove it"),
    ("# note\u2028rules: []\n", 1, 7, "remove it"),
    ("a: 1\n# note\x85b: 2\n", 2, 7, "remove it"),
    ("# note\rrules: []\n", 1, 7, "remove it"),
    ("a: 漢字\x7f\n", 1, 6, "remove it"),
    ("%TAG !e! tag:x,2000:\n---\na: 1\n", 1, 1, "remove it"),
]


@pytest.mark.parametrize(("text", "line", "col", "hint"), SYNTAX)
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


GOES_ON: list[tuple[str, list[tuple[int, int, str]], object]] = [
    ("a: 1\na: 2\n", [(2, 1, "duplicate-key")], {"a": 1}),
    ("a: {b: 1, b: 2}\n", [(1, 11, "duplicate-key")], {"a": {"b": 1}}),
    ("a: !bias\n", [(1, 4, "yaml-tag")], {"a": "!bias"}),
    ("a: !*.bias\n", [(1, 4, "yaml-tag")], {"a": "!*.bias"}),
    ("a: !!str 5\n", [(1, 4, "yaml-tag")], {"a": "5"}),
    ("a: !!set {x}\n", [(1, 4, "yaml-tag")], {"a": {"x": None}}),
    (
        "a: !!python/object/apply:os.system [x]\n",
        [(1, 4, "yaml-tag")],
        {"a": ["x"]},
    ),
    ("a: ! x\n", [(1, 4, "yaml-tag")], {"a": "x"}),
    ("<<: {x: 1}\ny1: 2\n", [(1, 1, "merge-key")], {"y1": 2}),
    ('"<<": 1\n', [], {"<<": 1}),
    ("1: a\n", [(1, 1, "key-type")], {}),
    ("~: a\n", [(1, 1, "key-type")], {}),
    ("true: a\nb: 1\n", [(1, 1, "key-type")], {"b": 1}),
    ("1.5: a\n", [(1, 1, "key-type")], {}),
    ("? [a, b]\n: c\n", [(1, 3, "key-type")], {}),
    ("? {a: b}\n: c\n", [(1, 3, "key-type")], {}),
    ("on: 1\n", [], {"on": 1}),
    ("a: 1\n---\nb: 2\n", [(2, 1, "several-documents")], {"a": 1}),
    ("a: *weight\nb: 1\n", [(1, 4, "yaml-syntax")], {"a": "*weight", "b": 1}),
    ("a: {0..5}\n", [], {"a": {"0..5": None}}),
    ("a: {}\n", [], {"a": {}}),
    ("a: {x, z: 1}\n", [], {"a": {"x": None, "z": 1}}),
    ("a: &k [1]\nb: *k\n", [], {"a": [1], "b": [1]}),
    ("a: &k 1\nb: &k 2\nc: *k\n", [], {"a": 1, "b": 2, "c": 2}),
    ("%YAML 1.2\n---\na: 1\n", [], {"a": 1}),
    ("a: " + "9" * 65 + "\n", [(1, 4, "too-large")], {"a": 0}),
    ("a: 0x" + "9" * 65 + "\n", [(1, 4, "too-large")], {"a": 0}),
]


@pytest.mark.parametrize(("text", "problems", "data"), GOES_ON)
def test_reading_goes_on_after_a_problem(
    text: str, problems: list[tuple[int, int, str]], data: object
) -> None:
    document = parse(text)
    assert found(document) == problems
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


@pytest.mark.parametrize(
    ("path", "line", "col", "width"),
    [
        ((), 1, 1, 7),
        (("version",), 1, 10, 1),
        (("rules",), 3, 3, 1),
        (("rules", 0), 3, 5, 2),
        (("rules", 0, "id"), 3, 9, 1),
        (("rules", 0, "params"), 4, 13, 9),
        (("rules", 0, "params", 1), 4, 19, 2),
        (("rules", 0, "steps"), 5, 12, 9),
        (("rules", 0, "clamp", "steps", "to"), 6, 17, 1),
        (("rules", 1, "min"), 8, 9, 1),
        (("rules", 1, "min", "float"), 8, 9, 1),
        (("rules", 7), 3, 3, 1),
        (("nothing",), 1, 1, 7),
    ],
)
def test_places_of_values(path: source.Path, line: int, col: int, width: int) -> None:
    place = parse(RULES, "f.yaml").place(path)
    assert (place.file, place.line, place.col, place.width) == ("f.yaml", line, col, width)
    assert place.line_text == RULES.split("\n")[line - 1]


def test_places_of_keys_and_of_missing_keys() -> None:
    document = parse(RULES)
    place = document.key_place(("rules", 0, "steps", "to"))
    assert (place.line, place.col, place.width) == (6, 13, 2)
    place = document.key_place(("rules", 0, "zero", "params"))
    assert (place.line, place.col, place.width) == (4, 5, 6)
    place = document.key_place(("rules", 1))  # an item of a list has no key
    assert (place.line, place.col) == (7, 5)
    assert document.key_place(()) == document.place(())
    place = document.missing_place(("rules", 1))
    assert (place.line, place.col, place.width) == (7, 5, 2)
    place = document.missing_place(("rules", 0, "steps"))
    assert (place.line, place.col, place.width) == (5, 13, 4)
    place = document.missing_place(("rules", 0, "id"))
    assert (place.line, place.col) == (3, 9)


def test_a_missing_key_of_an_empty_mapping_is_placed_at_its_brace() -> None:
    place = parse("rules: [{}]\n").missing_place(("rules", 0))
    assert (place.line, place.col, place.width) == (1, 9, 1)


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
