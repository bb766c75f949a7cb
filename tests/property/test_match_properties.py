"""Globs against a reference matcher that is slow, recursive and shares no code with the real one."""

from __future__ import annotations

import re

import pytest
from bounds import within
from fuzzing import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradsurgeon.common.match import PatternError, compile_pattern, select, suggest
from gradsurgeon.language.planning.manifest import ModuleEntry
from gradsurgeon.language.planning.matching import NameIndex

# Thousands of inputs take the same few lines, and tracing them twice the time.
pytestmark = pytest.mark.no_cover

SETTINGS = settings(derandomize=True, deadline=None, max_examples=examples(500))


def reference(pattern: str, name: str, at: int = 0) -> bool:
    """Tell whether ``pattern`` matches ``name`` from ``at`` to its end, by trying everything."""
    if not pattern:
        return at == len(name)
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        return any(reference(rest, name, end) for end in range(at, len(name) + 1))
    if head == "{":
        body, rest = rest.split("}", 1)
        return reference_braces(body, rest, name, at)
    if at == len(name):
        return False
    if head == "[":
        body, rest = rest.split("]", 1)
        wanted = not body.startswith("!")
        return (name[at] in body.lstrip("!")) is wanted and reference(rest, name, at + 1)
    return head in {"?", name[at]} and reference(rest, name, at + 1)


def reference_braces(body: str, rest: str, name: str, at: int) -> bool:
    if ".." not in body:
        return any(reference(item + rest, name, at) for item in body.split(","))
    low, high = map(int, body.split(".."))
    end = at
    while end < len(name) and name[end] in "0123456789":
        end += 1
    whole = end > at and (at == 0 or name[at - 1] not in "0123456789")
    return whole and low <= int(name[at:end]) <= high and reference(rest, name, end)


NAMES = st.text("ab.01", max_size=9)
ITEMS = st.lists(
    st.sampled_from(["", "a", "b", "ab", ".", "?", "*", "1", "[ab]", "a*"]), min_size=1, max_size=3
)
RANGES = st.tuples(st.integers(0, 12), st.integers(0, 120))
PIECES = st.one_of(
    st.sampled_from(["a", "b", ".", "0", "1", "*", "*", "**", "?", "[ab]", "[!a]", "[!01]"]),
    ITEMS.filter(any).map(lambda items: "{" + ",".join(items) + "}"),
    RANGES.map(lambda pair: f"{{{min(pair)}..{max(pair)}}}"),
)
GLOBS = st.lists(PIECES, min_size=1, max_size=6).map("".join)


@SETTINGS
@example("*{abc,b}*c", "abc")
@example("*{1..2}*{1..2}", "1.21.2")
@example("*{0..5}?{0..5}*1", "0.0101.1")
@given(GLOBS, NAMES)
def test_globs_match_as_the_reference_does(text: str, name: str) -> None:
    try:
        pattern = compile_pattern(text)
    except PatternError as error:
        assert "combinations" in error.message  # noqa: PT017 - the only reason there may be
        return
    assert pattern.matches(name) is reference(text, name)


@SETTINGS
@given(st.integers(0, 3_000), st.integers(0, 3_000), st.integers(0, 12_000))
def test_ranges_are_numeric(low: int, length: int, number: int) -> None:
    pattern = compile_pattern(f"{{{low}..{low + length}}}")
    for value in (number, low, low + length, low - 1, low + length + 1):
        assert pattern.matches(str(value)) is (low <= value <= low + length)
        assert pattern.matches(f"00{value}") is (low <= value <= low + length)


@SETTINGS
@given(st.text("abc*?[]{},.!-019^$()|+\\:re", max_size=14), NAMES)
def test_any_text_compiles_or_says_why(text: str, name: str) -> None:
    with within(1.0):
        try:
            compile_pattern(text).matches(name)
        except PatternError as error:
            assert error.message  # noqa: PT017 - both ways out are right


@SETTINGS
@given(st.text("ab.*+?|()[]{}1,^$\\d", min_size=1, max_size=14), NAMES)
def test_a_regular_expression_that_is_taken_means_what_python_says(text: str, name: str) -> None:
    try:
        pattern = compile_pattern(f"re:{text}")
    except PatternError:
        return
    with within(0.5):
        assert pattern.matches(name) is bool(re.fullmatch(text, name))
        pattern.matches("ab1." * 75)
        pattern.matches("a" * 299 + "!")


@SETTINGS
@given(st.lists(GLOBS, max_size=4), st.lists(NAMES, max_size=6))
def test_select_is_any_of_matches(texts: list[str], names: list[str]) -> None:
    patterns = []
    for text in texts:
        try:
            patterns.append(compile_pattern(text))
        except PatternError:
            continue
    expected = [i for i, name in enumerate(names) if any(p.matches(name) for p in patterns)]
    assert select(patterns, names) == expected


@SETTINGS
@example("{4..5}.a", ["007.a", "5.a", "05.a", "a.5"])
@example("[a.b].a", ["a.a", "..a", "b"])
@given(GLOBS, st.lists(NAMES.filter(bool), max_size=6, unique=True))
def test_a_model_is_searched_as_if_all_names_were_compared(text: str, names: list[str]) -> None:
    try:
        pattern = compile_pattern(text)
    except PatternError:
        return
    index = NameIndex("module", [ModuleEntry(name, (), ()) for name in names])
    expected = [name for name in names if name != "." and pattern.matches(name)]
    assert [name for name in index.hits(text) if name != "."] == expected


@SETTINGS
@given(st.text(max_size=20), st.lists(st.text(max_size=12), max_size=8))
def test_suggest_always_answers_in_one_line_of_words(text: str, names: list[str]) -> None:
    assert suggest(text, names)
