"""``gradsurgeon test``: whether rules still match and act as their tests say. Only tests with a gradient import torch."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from gradsurgeon.cli.lint import UNREADABLE
from gradsurgeon.cli.options import add_import, writing
from gradsurgeon.cli.review import rule_tests
from gradsurgeon.cli.review.rule_tests import SUFFIX, Result
from gradsurgeon.errors import GradSurgeonError, RuleFileError, printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.files import replacing

_JUNIT = {"failed": "failure", "not run": "skipped"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        default=["."],
        metavar="FILE",
        help=f"a file of tests, or a folder: all files *{SUFFIX} in it and below; default: the current folder",
    )
    parser.add_argument("--junit", metavar="FILE", help="also write the results as JUnit XML")
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    results = {}
    is_unreadable = False
    for path in _files(arguments.paths):
        try:
            results[path] = list(rule_tests.run(path))
        except RuleFileError as error:
            results[path] = []
            for problem in error.problems:
                print(f"{problem.full()}\n", file=sys.stderr)
                results[path].append(Result("the file", problem.place, "failed", problem.message))
                is_unreadable |= problem.check == UNREADABLE
        else:
            for result in results[path]:
                if result.outcome != "passed":
                    how = f"{result.outcome}: {printable(f'{result.name}: {result.reason}')}"
                    print(f"{result.place}: {how}")
    if arguments.junit is not None:
        _write_junit(Path(arguments.junit), results)
    outcomes = _outcomes(results)
    failed = outcomes["failed"]
    skipped = outcomes["not run"]
    summary = f"{count(outcomes.total(), 'test')}: {failed} failed"
    if skipped:
        summary += f"; {skipped} not run"
    print(summary, file=sys.stderr)
    if is_unreadable or (skipped and not failed):
        return 2
    return int(failed > 0)


def _outcomes(results: dict[str, list[Result]]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for of_file in results.values():
        outcomes.update(result.outcome for result in of_file)
    return outcomes


def _files(paths: Sequence[str]) -> dict[str, None]:
    """Return the files of tests, each once."""
    files: dict[str, None] = {}
    for path in paths:
        below = [path]
        if Path(path).is_dir():
            below = list(map(str, sorted(Path(path).rglob(f"*{SUFFIX}"))))
        if not below:
            raise GradSurgeonError(f"there is no file *{SUFFIX} in {printable(path)} or below")
        files |= dict.fromkeys(below)
    return files


def _write_junit(path: Path, results: dict[str, list[Result]]) -> None:
    suites = ET.Element("testsuites")
    for file, several in results.items():
        outcomes = [result.outcome for result in several]
        failures = str(outcomes.count("failed"))
        suite = ET.SubElement(
            suites, "testsuite", name=file, tests=str(len(outcomes)), failures=failures
        )
        for result in several:
            case = ET.SubElement(suite, "testcase", classname=file, name=printable(result.name))
            if result.outcome in _JUNIT:
                ET.SubElement(case, _JUNIT[result.outcome], message=printable(result.reason))
    with writing(str(path)), replacing(path) as stream:
        stream.write(ET.tostring(suites, encoding="unicode") + "\n")
