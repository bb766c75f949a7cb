"""Every file under ``cases/schema``: a new case is a new file.

``good`` files load; where one has warnings, ``<name>.out`` holds them. ``bad`` files are refused with
exactly the lines of ``<name>.out``, in which ``{version}``, ``{actions}`` and ``{packs}`` stand for
what changes with every release, action and pack. Files in folders are included by cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from gradsurgeon.actions import ACTIONS
from gradsurgeon.errors import Problem
from gradsurgeon.language import packs, schema, source

CASES = Path(__file__).parent.parent / "cases" / "schema"
BAD = sorted(CASES.glob("bad/*.yaml"))
GOOD = sorted(CASES.glob("good/*.yaml"))


# Words of Python and pydantic, which say nothing to the author of a rule file.
JARGON = ("input should", "tuple", "dict", "nonetype", "str ", "pydantic", "literal", "'['")


def written(problems: Iterable[Problem]) -> str:
    text = "".join(f"{problem.concise()}\n" for problem in problems)
    names = sorted(f"{packs.PREFIX}{spec}" for spec in packs.published())
    text = text.replace(schema.VERSION, "{version}").replace(", ".join(ACTIONS), "{actions}")
    return text.replace(", ".join(names), "{packs}")


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.stem)
def test_a_bad_file_shows_exactly_its_problems(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.with_suffix(".out").read_text(encoding="utf-8")
    assert ": error: " in expected
    monkeypatch.chdir(case.parent)
    problems = schema.Inspection(source.read(case.name)).problems
    assert written(problems) == expected
    for problem in problems:
        place = problem.place
        pack = packs.published().get(place.file.removeprefix(packs.PREFIX))
        path = pack.path if pack else Path(place.file)
        lines = path.read_text(encoding="utf-8").split("\n")
        assert 1 <= place.line <= len(lines)
        assert place.line_text == lines[place.line - 1]
        assert 1 <= place.col <= len(place.line_text) + 1


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.stem)
def test_a_good_file_loads(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = case.with_suffix(".out")
    expected = out.read_text(encoding="utf-8") if out.exists() else ""
    assert ": error: " not in expected
    monkeypatch.chdir(case.parent)
    assert written(schema.Inspection(source.read(case.name)).problems) == expected
    rules = schema.validate(source.read(case)).rules
    assert rules
    assert {rule.action for rule in rules} <= set(ACTIONS)


def test_every_expectation_belongs_to_a_case_and_speaks_of_rules_not_of_python() -> None:
    for out in sorted(CASES.glob("*/*.out")):
        assert out.with_suffix(".yaml").exists(), out
        text = out.read_text(encoding="utf-8").lower()
        assert [word for word in JARGON if word in text] == [], out


def test_there_are_cases() -> None:
    assert len(BAD) > 60
    assert len(GOOD) > 8
