"""``gradsurgeon test``: whether rules still match and act as their tests say. Only tests with a gradient import torch."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree as ET

from gradsurgeon.cli.lint import UNREADABLE
from gradsurgeon.cli.options import add_import, writing
from gradsurgeon.cli.review import rule_tests
from gradsurgeon.cli.review.rule_tests import SUFFIX, Result
from gradsurgeon.errors import GradSurgeonError, RuleFileError, printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.files import replacing


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
    results: dict[str, list[Result]] = {}
    is_unreadable = False
    for path in _files(arguments.paths):
        try:
            results[path] = list(rule_tests.run(rule_tests.read(path)))
        except RuleFileError as error:
            results[path] = []
            for problem in error.problems:
                print(f"{problem.full()}\n", file=sys.stderr)
                results[path].append(Result("the file", problem.place, problem.message))
                is_unreadable = is_unreadable or problem.check == UNREADABLE
        else:
            for result in results[path]:
                _print(result)
    if arguments.junit is not None:
        _write_junit(Path(arguments.junit), results)
    every = list(chain.from_iterable(results.values()))
    failed = sum(bool(result.failure) for result in every)
    skipped = sum(bool(result.skipped) for result in every)
    summary = f"{count(len(every), 'test')}: {failed} failed"
    if skipped:
        summary += f"; {skipped} not run"
    print(summary, file=sys.stderr)
    if is_unreadable or (skipped and not failed):
        return 2
    return int(failed > 0)


def _print(result: Result) -> None:
    """Print a line on a test that did not pass."""
    how = ""
    if result.skipped:
        how = f"not run: {printable(result.name)}: {result.skipped}"
    elif result.failure:
        how = f"failed: {printable(result.name)}: {printable(result.failure)}"
    if how:
        print(f"{result.place}: {how}")


def _files(paths: Sequence[str]) -> Iterator[str]:
    """Yield the files of tests, each once."""
    found: dict[str, None] = {}
    for path in paths:
        place = Path(path)
        if not place.is_dir():
            found[path] = None
            continue
        inside = [str(file) for file in sorted(place.rglob(f"*{SUFFIX}"))]
        if not inside:
            raise GradSurgeonError(f"there is no file *{SUFFIX} in {printable(path)} or below")
        found |= dict.fromkeys(inside)
    yield from found


def _write_junit(path: Path, results: dict[str, list[Result]]) -> None:
    suites = ET.Element("testsuites")
    for file, several in results.items():
        failed = sum(bool(result.failure) for result in several)
        suite = ET.SubElement(
            suites, "testsuite", name=file, tests=str(len(several)), failures=str(failed)
        )
        for result in several:
            case = ET.SubElement(suite, "testcase", classname=file, name=printable(result.name))
            if result.skipped:
                ET.SubElement(case, "skipped", message=result.skipped)
            elif result.failure:
                ET.SubElement(case, "failure", message=printable(result.failure))
    with writing(str(path)), replacing(path) as stream:
        stream.write(ET.tostring(suites, encoding="unicode") + "\n")
