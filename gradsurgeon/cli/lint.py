"""``gradsurgeon lint``: every problem of every file and its includes. Never imports torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsurgeon import review
from gradsurgeon.errors import Problem, printable

if TYPE_CHECKING:
    import argparse

UNREADABLE = "unreadable-file"


def run(arguments: argparse.Namespace) -> int:
    """Lint the files; 1 where one has errors, 2 where one cannot be read."""
    # A file that is named twice is one file.
    found = {file: review.lint(file) for file in dict.fromkeys(arguments.files)}
    problems = _distinct(found)
    if arguments.format == "json":
        print(json.dumps({"version": 1, "problems": [one.to_dict() for one in problems]}, indent=2))
    else:
        for problem in problems:
            print(f"{problem.full()}\n" if arguments.format == "full" else problem.concise())
        # Otherwise the summary could overtake what it sums up.
        sys.stdout.flush()
        print(_summary(found), file=sys.stderr)
    if any(problem.check == UNREADABLE for problem in problems):
        return 2
    return int(any(problem.severity == "error" for problem in problems))


def _distinct(found: dict[str, list[Problem]]) -> list[Problem]:
    """Return each problem once: files may share an include."""
    return list(dict.fromkeys(problem for group in found.values() for problem in group))


def _summary(found: dict[str, list[Problem]]) -> str:
    """Return ``rules.yaml: 14 errors, 1 warning``."""
    problems = _distinct(found)
    what = printable(next(iter(found))) if len(found) == 1 else f"{len(found)} files"
    if not problems:
        return f"{_count(len(found), 'file')} clean"
    counts = [_severity(problems, one) for one in ("error", "warning", "note")]
    clean = sum(not group for group in found.values())
    return f"{what}: {', '.join(filter(None, counts))}" + (f" ({clean} clean)" if clean else "")


def _severity(problems: Sequence[Problem], severity: str) -> str:
    number = sum(problem.severity == severity for problem in problems)
    return _count(number, severity) if number else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
