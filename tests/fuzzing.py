"""What property tests share: how many examples, and, of those that fuzz lint, what holds for every answer."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from pathlib import Path

from bounds import within
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from gradsurgeon.cli.review import formats, lint
from gradsurgeon.errors import Problem

CASES = Path(__file__).parent / "cases"
# Part of the examples that is tried: a tenth in the quick suite.
SHARE = float(os.environ.get("GRADSURGEON_TEST_SHARE", "1"))
QUICK = 0.1


def examples(count: int, *, long: bool = False) -> int:
    """Return how many of so many examples are tried.

    Args:
        count: how many are tried where everything runs.
        long: an example is a whole training: the quick suite tries a quarter of its tenth.
    """
    return max(1, round(count * (SHARE / 4 if long and SHARE <= QUICK else SHARE)))


HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
SECONDS = 2.0  # for one file and all forms of output; a small file takes milliseconds

# The same inputs in every run: what fails once fails again.
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=max(1, int(os.environ.get("GRADSURGEON_FUZZ", examples(1500))) // 4),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
# Whether a rule is one line, how lines end, and how the file begins.
SHAPES = st.tuples(st.booleans(), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\ufeff"]))


def copied(to: Path) -> Path:
    """Return a copy of the bad cases, in which what they include can be found."""
    return Path(shutil.copytree(CASES / "schema" / "bad", to / "bad"))


def answered(file: Path) -> list[Problem]:
    """Return the problems of a file, which can be written in every form and stand in their lines."""
    try:
        with within(SECONDS):
            problems = written(file)
    except AssertionError:
        # What takes long takes long again; collecting the garbage of a long test run does not.
        with within(SECONDS):
            problems = written(file)
    for problem in problems:
        assert problem.check in formats.all_checks()
        shown = problem.full().replace("\n", "")
        # Controls, overrides of direction, surrogates, line separators: what shows something else.
        assert not {unicodedata.category(char) for char in shown} & HIDDEN, shown
    return problems


def written(file: Path) -> list[Problem]:
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


def in_their_lines(problems: list[Problem], file: Path) -> None:
    """Show that places lie in the text, and that the line they show is the line they name."""
    lines: dict[str, list[str]] = {}
    for problem in problems:
        place = problem.place
        if problem.check == "unreadable-file" or place.file.startswith("gradsurgeon:"):
            continue
        if place.file not in lines:
            text = Path(place.file).read_bytes().decode("utf-8-sig", "replace")
            lines[place.file] = text.removeprefix("\ufeff").split("\n")
        line = lines[place.file][place.line - 1].removesuffix("\r")
        assert place.line_text == line, problem
        assert 1 <= place.col <= len(line) + 1
        assert 1 <= place.width <= max(1, len(line) - place.col + 1)
