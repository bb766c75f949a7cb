"""The checks of lint on what rules mean: every file under ``cases/lint``, and what no file can show.

``bad`` files give exactly the lines of ``<name>.out``; ``good`` files give none, or those of theirs.
A file named like a check is about that check. Files in folders are included by cases.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import guide
import pytest

from gradsurgeon.cli import review
from gradsurgeon.cli.review.checks import CHECKS, MAX_COMPARED, READING_CHECKS
from gradsurgeon.errors import Problem
from gradsurgeon.language import packs, schema, source

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases" / "lint"
BAD = sorted(CASES.glob("bad/*.yaml"))
GOOD = sorted(CASES.glob("good/*.yaml"))


def text_of(problems: list[Problem]) -> str:
    return "".join(f"{problem.concise()}\n" for problem in problems)


def lint(folder: Path, rules: str) -> list[Problem]:
    """Lint rules that are given as a text without the lines above them."""
    path = folder / "rules.yaml"
    path.write_text(f"version: 1\nrules:\n{rules}", encoding="utf-8")
    return review.lint(str(path))


def found(problems: list[Problem]) -> list[tuple[str, int, int]]:
    return [(one.check, one.place.line, one.place.col) for one in problems]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.stem)
def test_a_bad_file_shows_exactly_its_problems(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.parent)
    problems = review.lint(case.name)
    assert problems
    for problem in problems:
        place = problem.place
        lines = Path(place.file).read_text(encoding="utf-8").split("\n")
        assert place.line_text == lines[place.line - 1]
        assert 1 <= place.col <= len(place.line_text)
    assert text_of(problems) == case.with_suffix(".out").read_text(encoding="utf-8")
    assert {one.check for one in problems} <= {*CHECKS, *READING_CHECKS}


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.stem)
def test_a_good_file_is_clean(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.parent)
    problems = review.lint(case.name)
    out = case.with_suffix(".out")
    assert text_of(problems) == (out.read_text(encoding="utf-8") if out.exists() else "")
    assert case.stem not in {one.check for one in problems}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_a_bad_and_a_good_case(check: str) -> None:
    assert CASES / "good" / f"{check}.yaml" in GOOD
    assert f"[{check}]\n" in (CASES / "bad" / f"{check}.out").read_text(encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS)
def test_the_example_of_a_page_shows_what_it_says(check: str, tmp_path: Path) -> None:
    examples = CHECKS[check]
    bad = lint(tmp_path, "".join(f"- {rule}\n" for rule in examples.bad))
    assert check in {one.check for one in bad}
    severities = {one.severity for one in bad if one.check == check}
    assert severities == {examples.severity}


def test_no_name_is_that_of_two_checks() -> None:
    assert not set(CHECKS) & set(READING_CHECKS)
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", check) for check in CHECKS)


class TestSensibleFiles:
    @pytest.mark.parametrize("spec", sorted(packs.published()))
    def test_packs_have_notes_at_most(self, spec: str, tmp_path: Path) -> None:
        path = packs.published()[spec].path
        assert {one.severity for one in review.lint(str(path))} <= {"note"}
        including = tmp_path / "rules.yaml"
        including.write_text(f'version: 1\ninclude: ["{packs.PREFIX}{spec}"]\n')
        assert review.lint(str(including)) == []  # nobody can change a pack

    @pytest.mark.parametrize(
        "page", [ROOT / "README.md", *guide.PAGES.values()], ids=lambda page: page.stem
    )
    def test_the_examples_of_the_guide(self, page: Path, tmp_path: Path) -> None:
        text = page.read_text(encoding="utf-8")
        guide.write_files(text, tmp_path)
        for one in guide.blocks(text, "yaml"):
            (tmp_path / "shown.yaml").write_text(one, encoding="utf-8")
            warned = {
                problem.check
                for problem in review.lint(str(tmp_path / "shown.yaml"))
                if problem.severity != "note"
            }
            # One of them shows what the check warns of, another needs a module.
            expected = set()
            if "# order.yaml" in one:
                expected = {"effective-order"}
            if "own_edits:" in one:
                expected = {"unknown-action"}
            assert warned == expected


class TestSuppression:
    def test_line_ends_wide_characters_and_a_mark_at_the_beginning(self, tmp_path: Path) -> None:
        path = tmp_path / "rules.yaml"
        line = '  - {id: a, action: scale, params: "层", factor: 0}  # gradsurgeon: ignore[%s]'
        for check, expected in (("scale-by-zero", []), ("x", ["scale-by-zero"])):
            text = "\ufeffversion: 1\r\nrules:\r\n" + line % check + "\r\n"
            path.write_text(text, encoding="utf-8", newline="")
            assert [one.check for one in review.lint(str(path))] == expected


@pytest.mark.no_cover  # thousands of inputs, the same few lines
class TestHugeFiles:
    @pytest.mark.slow
    def test_very_many_rules_are_not_compared_which_is_said(self, tmp_path: Path) -> None:
        rules = "".join(
            f'  - {{id: r{index}, action: scale, params: "h.{index}.*.w{index}", factor: -2}}\n'
            for index in range(MAX_COMPARED + 5)
        )
        problems = lint(tmp_path, rules)
        assert found(problems) == [("too-large", 3, 10)]
        assert problems[0].severity == "warning"

    def test_hostile_patterns_do_not_hold_up_the_reader(self, tmp_path: Path) -> None:
        texts = [f"*{'?' * index}a*{{0..99999}}*[!b]{'?' * 40}*" for index in range(30)]
        rules = "".join(
            f'  - {{id: r{index}, action: scale, params: "{text}", exclude: "{text}c", factor: 2}}\n'
            for index, text in enumerate(texts)
        )
        schema.validate(source.parse(f"version: 1\nrules:\n{rules}"))
        start = time.process_time()
        lint(tmp_path, rules)
        assert time.process_time() - start < 20  # seconds, where it would be hours
