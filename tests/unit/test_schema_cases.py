"""Every file under ``cases/schema``: a new case is a new file.

``good`` files load; where one has warnings, ``<name>.out`` holds them. ``bad`` files are refused with
exactly the lines of ``<name>.out``, in which ``{version}``, ``{actions}`` and ``{packs}`` stand for
what changes with every release, action and pack. Files in folders are included by cases.
"""

from __future__ import annotations

import pathlib

import pytest

from gradsurgeon import packs, schema, source
from gradsurgeon.actions import ACTIONS

CASES = pathlib.Path(__file__).parent.parent / "cases" / "schema"
BAD = sorted(CASES.glob("bad/*.yaml"))
GOOD = sorted(CASES.glob("good/*.yaml"))


def problems_of(case: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(case.parent)
    problems = schema.inspect(source.read(case.name)).problems
    text = "".join(f"{problem.concise()}\n" for problem in problems)
    names = sorted(f"{packs.PREFIX}{spec}" for spec in packs.published())
    text = text.replace(schema.VERSION, "{version}").replace(", ".join(ACTIONS), "{actions}")
    return text.replace(", ".join(names), "{packs}")


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.stem)
def test_a_bad_file_shows_exactly_its_problems(
    case: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case.with_suffix(".out").read_text(encoding="utf-8")
    assert ": error: " in expected
    assert problems_of(case, monkeypatch) == expected


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.stem)
def test_a_good_file_loads(case: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = case.with_suffix(".out")
    expected = out.read_text(encoding="utf-8") if out.exists() else ""
    assert ": error: " not in expected
    assert problems_of(case, monkeypatch) == expected
    rules = schema.validate(source.read(case)).rules
    assert rules
    assert {rule.action for rule in rules} <= set(ACTIONS)


@pytest.mark.parametrize("out", sorted(CASES.glob("*/*.out")), ids=lambda out: out.stem)
def test_every_expectation_belongs_to_a_case(out: pathlib.Path) -> None:
    assert out.with_suffix(".yaml").exists()


@pytest.mark.parametrize("out", sorted(CASES.glob("*/*.out")), ids=lambda out: out.stem)
def test_messages_speak_of_rules_not_of_python(out: pathlib.Path) -> None:
    text = out.read_text(encoding="utf-8").lower()
    for jargon in (
        "input should",
        "tuple",
        "dict",
        "nonetype",
        "str ",
        "pydantic",
        "literal",
        "'['",
    ):
        assert jargon not in text


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.stem)
def test_every_place_lies_in_its_file(case: pathlib.Path) -> None:
    for problem in schema.inspect(source.read(case)).problems:
        place = problem.place
        pack = packs.published().get(place.file.removeprefix(packs.PREFIX))
        path = pack.path if pack else pathlib.Path(place.file)
        lines = path.read_text(encoding="utf-8").split("\n")
        assert 1 <= place.line <= len(lines)
        assert place.line_text == lines[place.line - 1]
        assert 1 <= place.col <= len(place.line_text) + 1


def test_there_are_cases() -> None:
    assert len(BAD) > 60
    assert len(GOOD) > 8
