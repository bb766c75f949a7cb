"""``gradsurgeon lint``: every problem of every file and its includes. Never imports torch."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

from gradsurgeon import review
from gradsurgeon.cli import fail
from gradsurgeon.errors import ManifestError, Problem, Severity, printable
from gradsurgeon.planning.table import count
from gradsurgeon.review import formats, sources

UNREADABLE = "unreadable-file"

_FAILING = {"error": ("error",), "warning": ("error", "warning"), "never": ()}


def run(arguments: argparse.Namespace) -> int:
    try:
        manifest = None if arguments.params is None else sources.manifest_of(arguments.params)
    except ManifestError as error:
        return fail(str(error))
    # A file that is named twice is one file.
    by_file = {file: review.lint(file, manifest) for file in dict.fromkeys(arguments.files)}
    problems = _distinct(by_file)
    # To a terminal that has colours, unless the user declines.
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colour = arguments.output is None and sys.stdout.isatty() and not plain
    text = formats.write(problems, arguments.format, root=_workspace(), colour=colour)
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
        print(_summary(by_file), file=sys.stderr)
    if any(problem.check == UNREADABLE for problem in problems):
        return 2
    return int(any(problem.severity in _FAILING[arguments.fail_on] for problem in problems))


def _workspace() -> Path:
    """Return the folder that GitHub takes paths from: the checkout, inside which a job may run."""
    try:
        here = Path.cwd()
    except OSError:
        here = Path("/")  # The working directory is gone: paths are shown as absolute ones.
    given = os.environ.get("GITHUB_WORKSPACE")
    return Path(given) if given and here.is_relative_to(given) else here


def _distinct(by_file: dict[str, list[Problem]]) -> list[Problem]:
    """Return each problem once: files may share an include."""
    return list(dict.fromkeys(problem for group in by_file.values() for problem in group))


def _summary(by_file: dict[str, list[Problem]]) -> str:
    severities = Counter(problem.severity for problem in _distinct(by_file))
    what = printable(next(iter(by_file))) if len(by_file) == 1 else f"{len(by_file)} files"
    if not severities:
        return f"{count(len(by_file), 'file')} clean"
    order = get_args(Severity)
    counts = [count(severities[name], name) for name in order if severities[name]]
    clean = sum(not group for group in by_file.values())
    return f"{what}: {', '.join(counts)}" + (f" ({clean} clean)" if clean else "")
