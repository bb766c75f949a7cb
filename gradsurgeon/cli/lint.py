"""``gradsurgeon lint``: every problem of every file and its includes. Never imports torch."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from gradsurgeon.cli import review
from gradsurgeon.cli.options import add_import, add_output, is_terminal, write_output
from gradsurgeon.cli.review import formats
from gradsurgeon.errors import Problem, Severity, printable
from gradsurgeon.language.planning import manifest_file
from gradsurgeon.language.planning.table import count

# The names of the model, where a repository keeps them.
BESIDE = "params.json"
UNREADABLE = "unreadable-file"
_UNSEEN = "; whether patterns match a model: gradsurgeon plan FILE --model MODULE:BUILD"
_FAILING = {"error": ("error",), "warning": ("error", "warning"), "never": ()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a rule file")
    names = parser.add_mutually_exclusive_group()
    names.add_argument(
        "--params",
        metavar="FILE",
        help="the names of the model, as `gradsurgeon params` writes them: rules that match nothing are errors",
    )
    names.add_argument(
        "--params-beside",
        action="store_true",
        help=f"the same with each {BESIDE} that lies beside a rule file",
    )
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
    output = arguments.output
    form = arguments.format
    # A file that is named twice is linted once.
    files = list(dict.fromkeys(arguments.files))
    all_problems: list[Problem] = []
    for file in files:
        params = arguments.params
        beside = Path(file).parent / BESIDE
        if arguments.params_beside and beside.is_file():
            params = str(beside)
        manifest = None
        if params is not None:
            manifest = manifest_file.read(params)
        all_problems += review.lint(file, manifest)
    # Files that share an include have its problems in common.
    problems = list(dict.fromkeys(all_problems))
    colour = output is None and is_terminal() and not os.environ.get("NO_COLOR")
    text = formats.write(problems, form, root=_workspace(), colour=colour)
    write_output(text, output)
    # Programs that read these formats from stdout have no use for a summary.
    if output is not None or form not in ("json", "sarif"):
        summary = _summary(files, problems)
        if form == "full" and not problems and arguments.params is None:
            summary += _UNSEEN
        print(summary, file=sys.stderr)
    code = 0
    for problem in problems:
        if problem.check == UNREADABLE:
            return 2
        if problem.severity in _FAILING[arguments.fail_on]:
            code = 1
    return code


def _workspace() -> Path:
    """Return the folder to which paths are relative: on GitHub the checkout, else the current folder."""
    here = Path.cwd()
    given = os.environ.get("GITHUB_WORKSPACE")
    if given and here.is_relative_to(given):
        return Path(given)
    return here


def _summary(files: Sequence[str], problems: Iterable[Problem]) -> str:
    severities = Counter(problem.severity for problem in problems)
    if not severities:
        return f"{count(len(files), 'file')} clean"
    counts = [count(severities[name], name) for name in get_args(Severity) if severities[name]]
    title = printable(files[0]) if len(files) == 1 else f"{len(files)} files"
    return f"{title}: {', '.join(counts)}"
