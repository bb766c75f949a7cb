"""Rule files that went wrong somewhere: lint answers, in time, and points at what is wrong.

Some hundred inputs of each kind by default. Many more, spread over the tests here:

    GRADSURGEON_FUZZ=100000 python -m pytest tests/property/test_lint_fuzz.py
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import unicodedata
from dataclasses import dataclass
from typing import Any

import pytest
from bounds import within
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gradsurgeon.errors import Problem
from gradsurgeon.review import formats, lint

CASES = pathlib.Path(__file__).parent.parent / "cases"
INPUTS = int(os.environ.get("GRADSURGEON_FUZZ", "1500"))
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
SECONDS = 2.0  # for one file and all forms of output; a small file takes milliseconds

# The same inputs in every run: what fails once fails again.
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=max(1, INPUTS // 4),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a copy of the bad cases, in which what they include can be found."""
    found = tmp_path_factory.mktemp("fuzz") / "bad"
    shutil.copytree(CASES / "schema" / "bad", found)
    return found


def answered(file: pathlib.Path) -> list[Problem]:
    """Return the problems of a file, which can be written in every form and stand in their lines."""
    try:
        with within(SECONDS):
            problems = written(file)
    except AssertionError:
        # What takes long takes long again; collecting the garbage of a long test run does not.
        with within(SECONDS):
            problems = written(file)
    for problem in problems:
        assert problem.check in formats.listed()
        shown = problem.full().replace("\n", "")
        # Controls, overrides of direction, surrogates, line separators: what shows something else.
        assert not {unicodedata.category(char) for char in shown} & HIDDEN, shown
    return problems


def written(file: pathlib.Path) -> list[Problem]:
    """Return the problems of a file, which can be written in every form."""
    problems = lint(str(file))
    for form in ("full", "concise"):
        formats.write(problems, form, colour=True).encode()
    assert len(json.loads(formats.write(problems, "json"))["problems"]) == len(problems)
    for line in formats.write(problems, "github").encode().splitlines():
        assert line.startswith((b"::error ", b"::warning ", b"::notice "))
    (run,) = json.loads(formats.write(problems, "sarif").encode())["runs"]
    assert len(run["results"]) == len(problems)
    return problems


def in_their_lines(problems: list[Problem], file: pathlib.Path) -> None:
    """Show that places lie in the text, and that the line they show is the line they name."""
    lines: dict[str, list[str]] = {}
    for problem in problems:
        place = problem.place
        if problem.check == "unreadable-file" or place.file.startswith("gradsurgeon:"):
            continue
        if place.file not in lines:
            text = pathlib.Path(place.file).read_bytes().decode("utf-8-sig", "replace")
            lines[place.file] = text.removeprefix("\ufeff").split("\n")
        line = lines[place.file][place.line - 1].removesuffix("\r")
        assert place.line_text == line, problem
        assert 1 <= place.col <= len(line) + 1
        assert 1 <= place.width <= max(1, len(line) - place.col + 1)


# -- bytes ----------------------------------------------------------------------------------------

FILES = sorted(path for path in CASES.rglob("*") if path.suffix in {".yaml", ".yml", ".json"})
PIECES = [
    b"\0", b"\r", b"\n", b"\r\n", b"\t", b" ", b"  ", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b"\xe2\x80\xa8", b"\xc2\x85", b"\xf0\x9f\x98\x80", b"\xe6\xbc\xa2", b"'", b'"', b"\\", b"[", b"]", b"{", b"}",
    b":", b": ", b",", b"- ", b"#", b" #", b"&a ", b"*a", b"!", b"!!str ", b"|", b">", b"%", b"@", b"`", b"?", b"? ",
    b"<<", b"~", b"---\n", b"...\n", b"null", b"true", b"no", b"1e999", b".nan", b"-.inf", b"0x10", b"1_0",
    b"9" * 70, b"a" * 300, b'"\\ud800"', b'"\\0\\e[2J"', b"\xe2\x80\xae", b"re:(a*)*", b"re:(", b"{0..11}", b"{0..", b"[!",
    b"version: 1\n", b"rules:\n", b"  - ", b"id: ", b"params: ", b"action: clamp\n", b'include: ["./a"]\n', b"requires: ",
]  # fmt: skip
WHERE = st.floats(0, 1, exclude_max=True)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), WHERE, st.sampled_from(PIECES)),
        st.tuples(st.just("overwrite"), WHERE, st.sampled_from(PIECES)),
        st.tuples(st.just("byte"), WHERE, st.binary(min_size=1, max_size=1)),
        st.tuples(st.just("delete"), WHERE, st.integers(1, 40)),
        st.tuples(st.just("repeat"), WHERE, st.integers(1, 40)),
        st.tuples(st.just("cut"), WHERE, st.just(0)),
        st.tuples(st.just("join"), WHERE, st.sampled_from(FILES)),
    ),
    min_size=1,
    max_size=5,
)


def mutated(raw: bytes, changes: list[tuple[str, float, Any]]) -> bytes:
    for kind, where, what in changes:
        at = int(where * (len(raw) + 1))
        before, after = raw[:at], raw[at:]
        if kind in {"insert", "overwrite", "byte"}:
            raw = before + what + after[0 if kind == "insert" else len(what) :]
        elif kind == "delete":
            raw = before + after[what:]
        elif kind == "repeat":
            raw = before + after[:what] * 3 + after[what:]
        elif kind == "cut":
            raw = before
        else:
            raw = before + what.read_bytes()
    return raw


@SETTINGS
@given(st.sampled_from(FILES), CHANGES)
def test_no_change_of_a_file_is_too_much(
    folder: pathlib.Path, case: pathlib.Path, changes: list[tuple[str, float, Any]]
) -> None:
    file = folder / "mutated.yaml"
    file.write_bytes(mutated(case.read_bytes(), changes))
    in_their_lines(answered(file), file)


# -- text -----------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *("id", "action", "params", "modules", "tensors", "tensor", "exclude", "where", "model"),
        *("at", "steps", "expect", "optional", "when", "min", "max", "factor", "max_norm", "per"),
        *(
            "norm_type",
            "then",
            "give_up_after",
            "forensics",
            "stats",
            "max_bytes",
            "mni",
            "<<",
            "?",
        ),
    ]
)
WORDS = st.one_of(
    st.sampled_from(
        [
            *("clamp", "scale", "zero", "freeze", "nan-trap", "norm-log", "capture", "clip-norm"),
            *("sanitize", '"*"', '"fc*.bias"', "'re:^a.*$'", '"re:(a+)+"', '"[9-0]"', '"{a,{b}"'),
            *("*", "*a", "&a b", "{a}", "[a", "!x", "yes", "010", "1:30", "~", "null", "true"),
            *("step", "backward", "grad", "output.grad", '"output[0].x"', "1", "-1e-3", ".nan"),
            *(
                "{from: 5, to: 1}",
                "{params: -1}",
                "{ndim: x}",
                "{numel: {min: 2}}",
                "[l2, l2]",
                "[]",
            ),
        ]
    ),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=12),
)
RULES = st.lists(st.lists(st.tuples(KEYS, WORDS), max_size=6), max_size=5)
# Whether a rule is one line, how lines end, and how the file begins.
SHAPES = st.tuples(st.booleans(), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\ufeff"]))
TOPS = st.lists(
    st.sampled_from(
        [
            "version: 1",
            "version: 2",
            'requires: ">=0.1"',
            "requires: soon",
            'include: ["gradsurgeon:clip@1"]',
            'include: ["include-parts/clean.yaml", "../x"]',
            "rulez: []",
            "",
            "#漢",
        ]
    ),
    max_size=4,
)


@SETTINGS
@given(TOPS, RULES, SHAPES)
def test_no_rule_file_is_too_much(
    folder: pathlib.Path, tops: list[str], rules: list[Any], shape: tuple[bool, str, str]
) -> None:
    flow, end, start = shape
    lines = [*tops, "rules:"]
    for rule in rules:
        pairs = [f"{key}: {value}" for key, value in rule]
        if flow:
            lines.append(f"  - {{{', '.join(pairs)}}}")
        else:
            lines += [f"  {'- ' if not i else '  '}{pair}" for i, pair in enumerate(pairs)]
    file = folder / "made.yaml"
    file.write_bytes((start + end.join(lines)).encode("utf-8", "surrogatepass"))
    in_their_lines(answered(file), file)


# -- one mistake, at a line that is known ---------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """A line of a rule, and what has to be said of it."""

    key: str
    value: str
    check: str
    at_key: bool = False


# Options of a rule that is fine without them: {id: r-N, action: clamp, params: "*", at: step, min: 0}.
MISTAKES = [
    Mistake("zzz-bad", "1", "unknown-key", at_key=True),
    Mistake("maxx", "3", "unknown-key", at_key=True),
    Mistake("min", "5", "duplicate-key", at_key=True),
    Mistake("max", '"0.5"', "wrong-type"),
    Mistake("max", "big", "wrong-type"),
    Mistake("steps", "{from: -1}", "bad-value"),
    Mistake("max", ".nan", "bad-value"),
    Mistake("exclude", '"re:(a*)*"', "bad-pattern"),
    Mistake("exclude", "7", "wrong-type"),
    Mistake("optional", "yes", "wrong-type"),
    Mistake("steps", "{from: 1, too: 4}", "unknown-key"),
    Mistake("expect", "6", "wrong-type"),
    Mistake("where", "{ndim: two}", "wrong-type"),
    Mistake("max", "!!float 3", "yaml-tag"),
    Mistake("yes", "1", "unknown-key", at_key=True),
    Mistake("3", "1", "key-type", at_key=True),
    Mistake("id", "r-0", "duplicate-key", at_key=True),
    Mistake("fc.bias", "1", "unknown-key", at_key=True),
    Mistake('"007"', "1", "unknown-key", at_key=True),
    Mistake('"²"', "1", "unknown-key", at_key=True),
    Mistake('""', "1", "unknown-key", at_key=True),
    Mistake("where", "{a.b: 1}", "unknown-key"),
]
NOISE: st.SearchStrategy[str] = st.sampled_from(["", "# a comment", "  # 漢: [", "      # - {"])


@SETTINGS
@given(st.data(), st.sampled_from(MISTAKES), SHAPES)
def test_a_mistake_is_found_at_its_line_and_column(
    folder: pathlib.Path, data: st.DataObject, mistake: Mistake, shape: tuple[bool, str, str]
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
    new: str  # with {head}, {key} and {value} of the line; a second line is a mistake there
    check: str
    keys: tuple[str, ...] = ()  # the options of which it makes sense; all without it
    alone: bool = False  # the file cannot be read further, so that nothing else is found


PLANTS = [
    Plant(
        "misspelt", "{head}{key}q: {value}", "unknown-key", ("params", "at", "exclude", "max_norm")
    ),
    Plant("added", "{head}{key}: {value}\n    zzz: 1", "unknown-key"),
    Plant("again", "{head}{key}: {value}\n    {key}: {value}", "duplicate-key"),
    Plant("action", "{head}{key}: zzz", "unknown-action", ("action",)),
    Plant("pattern", '{head}{key}: "re:(a*)*"', "bad-pattern", ("params", "exclude")),
    Plant(
        "type", "{head}{key}: {{a: 1}}", "wrong-type", ("params", "max_norm", "factor", "optional")
    ),
    Plant("value", "{head}{key}: never", "bad-value", ("at", "then", "per")),
    Plant("id", "{head}{key}: No_Id", "bad-value", ("id",)),
    Plant("tag", "{head}{key}: !x {value}", "yaml-tag"),
    Plant("tab", "\t{key}: {value}", "yaml-syntax", alone=True),
    Plant("quote", '{head}{key}: "a" b', "yaml-syntax", alone=True),
    Plant("bracket", "{head}{key}: a]: b: [c", "yaml-syntax", alone=True),
]


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
    folder: pathlib.Path, data: st.DataObject, text: list[str], shape: tuple[bool, str, str]
) -> None:
    _, end, start = shape
    lines = list(text)
    by_rule: dict[int, list[Option]] = {}
    for option in options(lines):
        by_rule.setdefault(option.rule, []).append(option)
    rules = data.draw(
        st.lists(st.sampled_from(sorted(by_rule)), min_size=1, max_size=3, unique=True)
    )
    expected: list[tuple[int, str]] = []
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
        new = plant.new.format(head=option.head, key=option.key, value=option.value).split("\n")
        lines[option.line : option.line + 1] = new
        added = len(new) - 1
        expected = [(line + added, check) for line, check in expected]
        expected.append((option.line + len(new), plant.check))
        planted.append(f"{plant.name} of {option.key}")
    above: list[str] = data.draw(st.lists(NOISE, max_size=5))
    file = folder / "real.yaml"
    file.write_bytes((start + end.join([*above, *lines]) + end).encode())
    problems = answered(file)
    in_their_lines(problems, file)
    errors = {
        (one.place.line - len(above), one.check) for one in problems if one.severity == "error"
    }
    assert errors >= set(expected), (planted, expected, errors)
    # Nothing but what follows from a mistake: the rule lacks what was misspelt.
    others = {check for _, check in errors - set(expected)}
    assert others <= {"missing-key"}, (planted, errors)
