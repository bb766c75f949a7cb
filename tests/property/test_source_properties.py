"""Any text at all: the reader answers, in time, and its places point at what they name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from bounds import within
from fuzzing import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import Json

from gradsurgeon.errors import RuleFileError
from gradsurgeon.language import source
from gradsurgeon.language.source import Document, parse, read

# Thousands of inputs take the same few lines, and tracing them twice the time.
pytestmark = pytest.mark.no_cover

if TYPE_CHECKING:
    from pathlib import Path

LOADERS = [pytest.param(yaml.SafeLoader, id="pure")]
if hasattr(yaml, "CSafeLoader"):
    LOADERS.append(pytest.param(yaml.CSafeLoader, id="libyaml"))

# The loader is set once per test and does not change between examples.
SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True, params=LOADERS)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(source, "_LOADER", request.param)
    return request.param


def found(document: Document) -> list[tuple[int, int, str]]:
    return [(p.place.line, p.place.col, p.check) for p in document.problems]


# -- laws -----------------------------------------------------------------------------------------

FRAGMENTS = [
    *"abyn019-:?,[]{}#&*!|>'\"%@`~=.<\\ \n\t\r",
    ": ",
    "- ",
    "\n  ",
    "\r\n",
    "---",
    "...",
    "<<",
    "&a ",
    "*a",
    "!!str ",
    "1e-3",
    "rules",
    "\ufeff",
    "\u2028",
    "\x85",
    "\0",
    "\ud800",
    "漢",
    "\U0001f600",
]


@SETTINGS
@example("a: &a {b: *a}")
@example("? ? ? a")
@example("%YAML 1.2\n%YAML 1.2\n---\n")
@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)))
def test_any_text_gives_a_document_whose_problems_can_be_shown(text: str) -> None:
    document = parse(text, "f.yaml")
    errors = [problem for problem in document.problems if problem.severity == "error"]
    assert document.data is not None or errors
    lines = text.removeprefix("\ufeff").split("\n")
    for problem in document.problems:
        place = problem.place
        assert place.line_text == lines[place.line - 1].removesuffix("\r")
        assert 1 <= place.col <= len(place.line_text) + 1
        assert place.width >= 1
        assert problem.check in CHECKS
        assert problem.full().encode()


CHECKS = {
    "yaml-syntax",
    "duplicate-key",
    "yaml-tag",
    "merge-key",
    "key-type",
    "too-large",
    "several-documents",
    "empty-file",
}

KEYS = st.text("abc漢-_", min_size=1, max_size=6)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**18), 10**18), st.floats(allow_nan=False), TEXTS
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


def flow(tree: object) -> str:
    """Write a tree as YAML by hand, so that it does not depend on how PyYAML resolves scalars."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(flow, tree)) + "]"
    if isinstance(tree, str):
        escaped = (
            f"\\U{ord(char):08x}" if char in '"\\' or ord(char) > 126 or ord(char) < 32 else char
            for char in tree
        )
        return '"' + "".join(escaped) + '"'
    if tree is None or isinstance(tree, bool):
        return str(tree).replace("None", "null").lower()
    return repr(tree).replace("inf", ".inf")


@SETTINGS
@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=4))
def test_what_is_written_is_read_and_found_at_its_place(tree: Json) -> None:
    text = "".join(f"{key}:\n  {flow(value)}\n" for key, value in tree.items())
    keys_alone = any(key in {"-", "a-"} or key.startswith("-") for key in tree)
    document = parse(text)
    if keys_alone or any(problem.severity == "error" for problem in document.problems):
        return
    assert document.data == tree
    for number, (key, value) in enumerate(tree.items()):
        place = document.key_place((key,))
        assert (place.line, place.col, place.width) == (2 * number + 1, 1, len(key))
        place = document.place((key,))
        assert (place.line, place.col) == (2 * number + 2, 3)
        if isinstance(value, list):
            for index, item in enumerate(value):
                place = document.place((key, "a-branch-of-a-union", index))
                shown = place.line_text[place.col - 1 : place.col - 1 + place.width]
                assert shown == flow(item)


# -- hostile text: refused soon -----------------------------------------------------------------


def bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines)


HOSTILE: dict[str, tuple[str, str]] = {
    "deep flow": ("[" * 900, "too-large"),
    "deep flow, huge": ("[" * 1_000_000, ""),
    "deep mappings": ("{a: " * 10_000, "too-large"),
    "deep blocks": ("- " * 30_000, "too-large"),
    "deep keys": ("? " * 30_000, "too-large"),
    "alias bomb": (bomb(), "too-large"),
    "text bomb": ("a: &a " + "x" * 40_000 + "\nb: [" + "*a," * 2_000 + "]", "too-large"),
    "alias in itself": ("a: &a [*a]", "yaml-syntax"),
    "alias in itself, deep": ("a: &a {b: {c: [*a]}}", "yaml-syntax"),
    "ten megabytes": ("a: 1\n" * 2_000_000, "too-large"),
    "one long line": ("a: " + "x" * (1 << 20), "too-large"),
    "many values": ("[" + "1," * 500_000 + "]", "too-large"),
    "many duplicates": ("a: 1\n" * 10_000, "duplicate-key"),
    "huge number": ("a: " + "9" * 60_000, ""),
    "huge hexadecimal": ("a: 0x" + "f" * 60_000, ""),
    "tag directives": ("".join(f"%TAG !{i}! x\n" for i in range(4_000)), "yaml-syntax"),
    "many tag directives": ("".join(f"%TAG !{i}! x\n" for i in range(60_000)), "yaml-syntax"),
    "NUL bytes": ("\0" * 60_000, "yaml-syntax"),
    "binary": (bytes(range(256)).decode("latin-1") * 150, "yaml-syntax"),
    "surrogates": ("a: \udcff\ud800", "yaml-syntax"),
    "colons": (": " * 30_000, "yaml-syntax"),
    "blanks": ("a: b" + " " * 60_000 + ": c", "yaml-syntax"),
    "stars": ("a: " + "*" * 60_000, "yaml-syntax"),
    "colons in one line": ("a: [" + "b: " * 20_000, "yaml-syntax"),
    "documents": ("---\n" * 15_000, "empty-file"),
    "tabs": ("\t" * 60_000, "yaml-syntax"),
    "open quote": ('a: "' + "\n" * 60_000, "yaml-syntax"),
    "many keys": ("k\n" * 30_000, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_within_seconds(name: str, loader: Any) -> None:
    text, check = HOSTILE[name]
    with within(3.0 if loader is yaml.SafeLoader else 1.0):
        document = parse(text)
        shown = str(RuleFileError(document.problems)) if document.problems else ""
    if check:
        assert check in {p.check for p in document.problems}
        assert shown
        assert any(p.severity == "error" for p in document.problems)


def test_a_huge_float_is_read_and_left_to_the_schema() -> None:
    assert parse("a: " + "9" * 60_000 + ".0").data == {"a": math.inf}


def test_a_large_honest_file_is_read_in_time(loader: Any) -> None:
    count = 300 if loader is yaml.SafeLoader else 1_000
    rule = (
        '  - id: rule-{}\n    action: clamp\n    params: ["h.*.attn.*", "x.{}"]\n    min: -1e-3\n'
    )
    text = "rules:\n" + "".join(rule.format(i, i) for i in range(count))
    with within(1.0):
        document = parse(text)
    assert document.problems == ()
    assert document.place(("rules", count - 1, "min")).line == 1 + 4 * count


# -- files ----------------------------------------------------------------------------------------


def test_read_gives_what_parse_gives(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_bytes("\ufeffa: 漢\r\nb: 2\r\n".encode())
    document = read(file)
    assert document.data == {"a": "漢", "b": 2}
    assert document.file == str(file)
    place = document.place(("b",))
    assert (place.line, place.col, place.line_text) == (2, 4, "b: 2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff\xfe", "cannot read the file: byte 4 is not UTF-8 text"),
        (b"\xff\xfea\x00:\x00", "cannot read the file: byte 1 is not UTF-8 text"),
        (b"\x00" * 10_000_000, "cannot read the file: over 1024 KiB of text"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_bytes(content)
    with pytest.raises(RuleFileError, match=message) as raised:
        read(file)
    (problem,) = raised.value.problems
    assert problem.check == "unreadable-file"
    assert (problem.place.line, problem.place.col) == (1, 1)
    assert problem.hint == "name a readable file of UTF-8 text"


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleFileError, match="cannot read the file: No such file or directory"):
        read(tmp_path / "none.yaml")
    with pytest.raises(RuleFileError, match="cannot read the file: Is a directory"):
        read(tmp_path)
    with pytest.raises(RuleFileError, match="cannot read the file: embedded null byte"):
        read("a\0b")


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_bytes("é".encode() * 5_000_000)
    with within(1.0), pytest.raises(RuleFileError, match="over 1024 KiB of text"):
        read(file)
