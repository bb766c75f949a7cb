"""``gradsurgeon lint``: every problem of every file and its includes. Never imports torch."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import get_args

from gradsurgeon.cli import review
from gradsurgeon.cli.options import add_import, add_output, write_output
from gradsurgeon.cli.review import formats
from gradsurgeon.errors import Problem, Severity, printable
from gradsurgeon.language.planning.table import count

UNREADABLE = "unreadable-file"
_UNSEEN = "; whether patterns match a model: gradsurgeon plan FILE --model MODULE:BUILD"
_FAILING = {"error": ("error",), "warning": ("error", "warning"), "never": ()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a rule file")
    parser.add_argument(
        "--format",
        choices=("full", "concise", "json", "github", "sarif"),
        default="full",
        help="full (the default) and concise are for people, json is documented and stable, github "
        "annotates the lines of a pull request, sarif 2.1.0 is for code scanning",
    )
    add_output(parser)
    parser.add_argument(
        "--fail-on",
        choices=("error", "warning", "never"),
        default="error",
        help="which problems make the exit code 1, default: error; an unreadable file makes it 2",
    )
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    output, form = arguments.output, arguments.format
    # A file that is named twice is linted once.
    by_file = {file: review.lint(file) for file in dict.fromkeys(arguments.files)}
    # Files may share an include.
    problems = list(dict.fromkeys(chain.from_iterable(by_file.values())))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colour = output is None and sys.stdout.isatty() and not plain
    text = formats.write(problems, form, root=_workspace(), colour=colour)
    write_output(text, output)
    # Programs that read these formats from stdout have no use for a summary.
    if output is not None or form not in ("json", "sarif"):
        summary = _summary(by_file, problems)
        print(summary + _UNSEEN * (form == "full" and summary.endswith("clean")), file=sys.stderr)
    if any(problem.check == UNREADABLE for problem in problems):
        return 2
    return int(any(problem.severity in _FAILING[arguments.fail_on] for problem in problems))


def _workspace() -> Path:
    """Return the folder to which paths are relative: on GitHub the checkout, else the current folder."""
    try:
        here = Path.cwd()
    except OSError:
        here = Path("/")  # Without a working directory, paths are absolute.
    given = os.environ.get("GITHUB_WORKSPACE")
    return Path(given) if given and here.is_relative_to(given) else here


def _summary(files: Collection[str], problems: Iterable[Problem]) -> str:
    severities = Counter(problem.severity for problem in problems)
    if not severities:
        return f"{count(len(files), 'file')} clean"
    order = get_args(Severity)
    counts = [count(severities[name], name) for name in order if severities[name]]
    what = printable(next(iter(files))) if len(files) == 1 else f"{len(files)} files"
    return f"{what}: {', '.join(counts)}"
