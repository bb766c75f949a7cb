"""``gradsurgeon lint``: every problem of every file and its includes. Never imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gradsurgeon import review
from gradsurgeon.cli import fail
from gradsurgeon.errors import ManifestError, Problem, printable
from gradsurgeon.review import formats, sources

if TYPE_CHECKING:
    import argparse

UNREADABLE = "unreadable-file"

_FAILING = {"error": ("error",), "warning": ("error", "warning"), "never": ()}


def run(arguments: argparse.Namespace) -> int:
    """Lint the files; 1 where one has what `--fail-on` names, 2 where one, or the names, cannot be read."""
    try:
        manifest = None if arguments.params is None else sources.manifest_of(arguments.params)
    except ManifestError as error:
        return fail(str(error))
    # A file that is named twice is one file.
    found = {file: review.lint(file, manifest) for file in dict.fromkeys(arguments.files)}
    problems = _distinct(found)
    colour = arguments.output is None and coloured(sys.stdout)
    text = formats.write(problems, arguments.format, root=workspace(), colour=colour)
    if arguments.output is not None:
        try:
            Path(arguments.output).write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            return fail(f"cannot write {printable(arguments.output)}: {error.strerror or error}")
    else:
        sys.stdout.write(text)
        # Otherwise the summary could overtake what it sums up.
        sys.stdout.flush()
    # A program that reads the whole list from stdout has no use for it.
    if arguments.output is not None or arguments.format not in ("json", "sarif"):
        print(_summary(found), file=sys.stderr)
    if any(problem.check == UNREADABLE for problem in problems):
        return 2
    return int(any(problem.severity in _FAILING[arguments.fail_on] for problem in problems))


def coloured(stream: TextIO) -> bool:
    """Return whether to write colours: to a terminal that has them, unless the user has had enough."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def workspace() -> Path:
    """Return the folder that GitHub takes paths from: the checkout, inside which a job may run."""
    try:
        here = Path.cwd()
    except OSError:
        here = Path("/")  # The working directory is gone: paths are shown as absolute ones.
    given = os.environ.get("GITHUB_WORKSPACE")
    return Path(given) if given and here.is_relative_to(given) else here


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
