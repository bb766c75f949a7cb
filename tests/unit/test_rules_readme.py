"""The pages in `rules/`, the guide, and `rules.schema.json`: what they say holds, what is generated is fresh.

Run this file as a script to write what is generated anew.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import gradsurgeon
from gradsurgeon.cli.schema import document_schema
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.language import schema, source

if __name__ == "__main__":  # under pytest `tests` is on the path
    sys.path.append(str(Path(__file__).parents[1]))

import guide

REFERENCE, API, SCHEMA = (
    guide.RULES / name for name in ("reference.md", "python-api.md", "rules.schema.json")
)
REVIEW, SETUPS = guide.PAGES["review"], guide.PAGES["setups"]
GUIDE = guide.whole()
REMEDY = "run `python tests/unit/test_rules_readme.py`"
EXAMPLE = Path(__file__).parents[1] / "cases" / "review"


@cache
def generated() -> dict[Path, str]:
    import python_api
    import reference
    import setups
    import surgery

    review = between("<!-- example: the change -->", the_change(), guide.text("review"))
    return {
        REVIEW: between(
            "<!-- example: the comment -->", comment(), review, "<!-- example: end -->"
        ),
        SETUPS: between(
            "<!-- edits: begin; this file too -->",
            f"\n{surgery.table()}\n",
            between(
                "<!-- set-ups: begin; `python tests/unit/test_rules_readme.py` writes this -->",
                f"\n{setups.table(setups.collected())}\n",
                guide.text("setups"),
                "<!-- set-ups: end -->",
            ),
            "<!-- edits: end -->",
        ),
        REFERENCE: reference.page(),
        API: python_api.page(),
        SCHEMA: json.dumps(document_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def between(begin: str, text: str, page: str, end: str = "<!-- example: end -->") -> str:
    """Return a page with the part between two lines made anew."""
    before, found, rest = page.partition(f"{begin}\n")
    assert found
    return "".join((before, found, text, end, rest.partition(end)[2]))


def the_change() -> str:
    old, new = ((EXAMPLE / name).read_text().splitlines() for name in ("old.yaml", "new.yaml"))
    lines = difflib.unified_diff(old, new, "old.yaml", "new.yaml", lineterm="")
    return "\n".join(("```diff", *lines, "```", ""))


def comment() -> str:
    """Return what the command prints that the guide names; that it does is tested with the command."""
    command = "diff old.yaml new.yaml --params params.json --format markdown"
    assert f"`gradsurgeon {command}`" in guide.text("review")
    return (EXAMPLE / "expected.md").read_text(encoding="utf-8")


def table(header: str) -> list[list[str]]:
    """Return the cells of the table of the guide that begins with ``header``."""
    rows = GUIDE.partition(f"| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows
    return [re.split(r" (?<!\\)\| ", row.strip("| ")) for row in rows]


def words(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def shown() -> list[str]:
    """Return every rule file that the guide and the reference show, but for one that needs a module: its page has a test."""
    text = REFERENCE.read_text(encoding="utf-8")
    files = [*guide.blocks(GUIDE, "yaml"), *guide.blocks(text, "yaml")]
    return [file for file in files if "own_edits:" not in file]


@pytest.fixture(params=range(len(shown())))
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return one of the files shown, with those beside it that have names."""
    guide.write_files(GUIDE, tmp_path)
    path = tmp_path / "shown.yaml"
    path.write_text(shown()[request.param], encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [REVIEW, SETUPS, REFERENCE, API, SCHEMA], ids=lambda path: path.name
)
def test_what_is_generated_is_fresh(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generated()[path], REMEDY


def test_every_file_shown_is_valid(file: Path) -> None:
    assert gradsurgeon.load(file).rules


@pytest.mark.parametrize("row", table("pattern | of these names | matches"), ids=lambda row: row[0])
def test_patterns_match_what_the_table_says(row: list[str]) -> None:
    (text,) = words(row[0])
    pattern = compile_pattern(text.strip('"'))
    assert [name for name in words(row[1]) if pattern.matches(name)] == words(row[2])


@pytest.mark.parametrize("row", table("written | found"), ids=lambda row: row[0])
def test_mistakes_are_found_as_the_table_says(row: list[str]) -> None:
    written = row[0].strip("`").replace(r"\|", "|")
    problems = schema.Inspection(source.parse(f"version: 1\nrules:\n  - {written}\n")).problems
    assert len(problems) == 1
    assert row[1] in problems[0].concise()


def test_everything_exported_is_on_the_page_of_the_python_api() -> None:
    import python_api

    assert python_api.exported() == set(gradsurgeon.__all__)


def test_no_cell_of_the_table_of_set_ups_is_without_a_test() -> None:
    assert "not tested" not in guide.text("setups").partition("\n\n1. ")[0]


@pytest.mark.slow
def test_the_diagnosis_of_the_guide_is_what_the_script_gets(tmp_path: Path) -> None:
    page = guide.text("nan")
    part = page.partition("<!-- worked example: begin")[2].partition("<!-- worked example: end")[0]
    (said,) = guide.blocks(part, "")
    guide.write_files(part, tmp_path)
    import forks
    from bounds import TIMEOUT
    from commands import environment

    done = forks.start(["train.py"], cwd=tmp_path, env=environment()).wait(TIMEOUT)
    error = done.stderr.decode().partition("NonFiniteGradientError: ")[2]
    error = error.replace(f"{tmp_path}/", "")
    assert error.strip() == said.strip()


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
