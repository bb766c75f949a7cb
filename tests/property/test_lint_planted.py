"""Mistakes that were put at a known line: lint finds them there, and finds nothing else.

As many inputs as in `test_lint_fuzz.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from fuzzing import CASES, SETTINGS, SHAPES, answered, copied, in_their_lines
from hypothesis import given
from hypothesis import strategies as st

# Thousands of inputs take the same few lines, and tracing them twice the time.
pytestmark = pytest.mark.no_cover


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("fuzz"))


# -- one mistake, at a line that is known ---------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """A line of a rule, and what has to be said of it."""

    key: str
    value: str
    check: str
    at_key: bool = False


TABLES = yaml.safe_load((CASES / "planted.yaml").read_text(encoding="utf-8"))
# Options of a rule that is fine without them: {id: r-N, action: clamp, params: "*", at: step, min: 0}.
MISTAKES = [Mistake(**row) for row in TABLES["mistakes"]]
NOISE: st.SearchStrategy[str] = st.sampled_from(["", "# a comment", "  # 漢: [", "      # - {"])


@SETTINGS
@given(st.data(), st.sampled_from(MISTAKES), SHAPES)
def test_a_mistake_is_found_at_its_line_and_column(
    folder: Path, data: st.DataObject, mistake: Mistake, shape: tuple[bool, str, str]
) -> None:
    flow, end, start = shape
    count = data.draw(st.integers(1, 8))
    noise: list[str] = data.draw(st.lists(NOISE, max_size=12))
    guilty = data.draw(st.integers(0, count - 1))
    lines = ["version: 1", "rules:"]
    where = (0, 0)
    for number in range(count):
        pairs = [f"id: r-{number}", "action: clamp", 'params: "漢*"', "at: step", "min: 0"]
        if number == guilty:
            # Behind the key that is given twice: the second of the two is the mistake.
            at = len(pairs) if mistake.check == "duplicate-key" else data.draw(st.integers(1, 5))
            pairs.insert(at, f"{mistake.key}: {mistake.value}")
        heads = [f"  - {{{', '.join(pairs)}}}"] if flow else [f"    {pair}" for pair in pairs]
        if not flow:
            heads[0] = f"  - {pairs[0]}"
        if number == guilty:
            row = 0 if flow else at
            text = f"{mistake.key}: {mistake.value}"
            col = len("  - {" + ", ".join([*pairs[:at], ""])) if flow else 4
            assert heads[row][col:].startswith(text)
            where = (len(lines) + row + 1, col + 1)
        lines += heads
        if data.draw(st.booleans()) and noise:
            position = data.draw(st.integers(2, len(lines)))
            lines.insert(position, noise.pop())
            where = (where[0] + (position < where[0]), where[1])
    file = folder / "one.yaml"
    file.write_bytes((start + end.join(lines) + end).encode())
    problems = answered(file)
    in_their_lines(problems, file)
    errors = [problem for problem in problems if problem.severity == "error"]
    assert [problem.check for problem in errors] == [mistake.check], file.read_text()
    line, col = where
    (error,) = errors
    assert error.place.line == line
    if mistake.at_key:
        assert error.place.col == col
    else:
        first = col + len(mistake.key) + 2
        assert first <= error.place.col < first + len(mistake.value)


# -- mistakes in files that people wrote ----------------------------------------------------------

PACKS = sorted((CASES.parents[1] / "rules").glob("*.yaml"))
OPTION = re.compile(r"(?P<head>  - |    )(?P<key>[a-z_]+): (?P<value>[^\s#].*)")


AT_KEY = frozenset({"unknown-key", "duplicate-key"})  # the others are shown at the value


@dataclass(frozen=True)
class Option:
    """A line of a file with an option of a rule, which is on this line alone."""

    line: int
    rule: int  # the first line of the rule
    head: str
    key: str
    value: str


@dataclass(frozen=True)
class Plant:
    """What is done to the line of an option, and what has to be said of it."""

    name: str
    new: str  # with {head}, {key}, {value} and {line} of the option; a second line is a mistake there
    check: str
    keys: Sequence[str] = ()  # the options of which it makes sense; all without it
    alone: bool = False  # the file cannot be read further, so that nothing else is found


PLANTS = [Plant(**row) for row in TABLES["plants"]]


def options(lines: list[str]) -> list[Option]:
    """Return the options of the rules of a file that is written one option a line."""
    found: list[Option] = []
    rule = 0
    for number, line in enumerate(lines):
        parts = OPTION.fullmatch(line)
        if parts is None or "rules:" not in lines[:number]:
            continue
        rule = number if parts["head"] == "  - " else rule
        found.append(Option(number, rule, parts["head"], parts["key"], parts["value"]))
    return found


TEXTS = [path.read_text(encoding="utf-8").splitlines() for path in PACKS]


@SETTINGS
@given(st.data(), st.sampled_from(TEXTS), SHAPES)
def test_mistakes_in_a_real_file_are_found_at_their_lines(
    folder: Path, data: st.DataObject, text: list[str], shape: tuple[bool, str, str]
) -> None:
    _, end, start = shape
    lines = list(text)
    by_rule: dict[int, list[Option]] = {}
    for option in options(lines):
        by_rule.setdefault(option.rule, []).append(option)
    rules = data.draw(
        st.lists(st.sampled_from(sorted(by_rule)), min_size=1, max_size=3, unique=True)
    )
    expected: list[tuple[int, str, range]] = []  # line, check, and the columns that are right
    planted: list[str] = []
    # From the end, so that the numbers of the lines before a mistake stay what they are.
    for rule in sorted(rules, reverse=True):
        fitting = [
            (plant, option)
            for plant in PLANTS
            for option in by_rule[rule]
            if (not plant.keys or option.key in plant.keys)
            and (not plant.alone or (len(rules) == 1 and option.head != "  - "))
        ]
        plant, option = data.draw(st.sampled_from(fitting))
        new = plant.new.format_map(vars(option)).split("\n")
        lines[option.line : option.line + 1] = new
        added = len(new) - 1
        expected = [(line + added, check, columns) for line, check, columns in expected]
        key = 1 if plant.alone else len(option.head) + 1
        wide = 1 if plant.check in AT_KEY else 500
        col = key if plant.alone or plant.check in AT_KEY else key + len(option.key) + 2
        expected.append((option.line + len(new), plant.check, range(col, col + wide)))
        planted.append(f"{plant.name} of {option.key}")
    above: list[str] = data.draw(st.lists(NOISE, max_size=5))
    file = folder / "real.yaml"
    file.write_bytes((start + end.join([*above, *lines]) + end).encode())
    problems = answered(file)
    in_their_lines(problems, file)
    errors = [one for one in problems if one.severity == "error"]
    for line, check, columns in expected:
        (found,) = (
            one for one in errors if (one.place.line - len(above), one.check) == (line, check)
        )
        assert found.place.col in columns, (planted, found)
        errors.remove(found)
    # Nothing but what follows from a mistake: the rule lacks what was misspelt.
    assert {one.check for one in errors} <= {"missing-key"}, (planted, errors)
