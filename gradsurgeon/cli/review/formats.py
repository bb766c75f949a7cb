"""Write problems in each format, with a user's text escaped for it."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from gradsurgeon.cli.review.checks import CHECKS, READING_CHECKS
from gradsurgeon.errors import Place, Problem, Severity, printable
from gradsurgeon.language.schema import VERSION

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_WORDS: Mapping[str, str] = {"error": "error", "warning": "warning", "note": "notice"}
_COLOURS: Mapping[str, str] = {"error": "\033[1;31m", "warning": "\033[1;33m", "note": "\033[1;36m"}
_RESET = "\033[0m"


def write(
    problems: Sequence[Problem], form: str, *, root: Path | None = None, colour: bool = False
) -> str:
    root = root or Path.cwd()
    if form == "json":
        entries = [problem.to_dict() for problem in problems]
        texts = [json.dumps({"version": 1, "problems": entries}, indent=2)]
    elif form == "sarif":
        texts = [_sarif(problems, root)]
    elif form == "github":
        texts = [_github(problem, root) for problem in problems]
    else:
        texts = [_for_people(problem, form, colour=colour) for problem in problems]
    return "".join(f"{text}\n" for text in texts)


def _for_people(problem: Problem, form: str, *, colour: bool) -> str:
    text = problem.concise()
    if form == "full":
        text = f"{problem.full()}\n"
    if colour:
        severity = problem.severity
        coloured = f" {_COLOURS[severity]}{severity}:{_RESET}"
        text = text.replace(f" {severity}:", coloured, 1)
    return text


# -- GitHub ---------------------------------------------------------------------------------------


def _github(problem: Problem, root: Path) -> str:
    """Return a command such as ``error``, with escaped arguments that cannot end it."""
    place = problem.place
    properties: dict[str, object] = {"file": _path_from(root, place.file)}
    if place.line:
        properties |= {"line": place.line, "col": place.col, "endColumn": _end_column(place)}
    properties["title"] = problem.check
    arguments = []
    for key, value in properties.items():
        text = _data(str(value)).replace(":", "%3A").replace(",", "%2C")
        arguments.append(f"{key}={text}")
    command = f"{_WORDS[problem.severity]} {','.join(arguments)}"
    return f"::{command}::{_data(_message_and_hint(problem))}"


def _data(text: str) -> str:
    # `printable` escapes every other control character.
    lines = map(printable, text.replace("\r\n", "\n").split("\n"))
    return "\n".join(lines).replace("%", "%25").replace("\n", "%0A")


def _path_from(root: Path, file: str) -> str:
    """Return a path relative to ``root``, with slashes; a path outside of it stays as it is."""
    path = Path(file)
    try:
        # Not resolved, because a link is reviewed at its own path.
        return Path(os.path.abspath(path)).relative_to(root).as_posix()  # noqa: PTH100 # `resolve` would follow links
    except ValueError:  # outside of the root, or no path at all
        return path.as_posix()


def _message_and_hint(problem: Problem) -> str:
    if not problem.hint:
        return problem.message
    return f"{problem.message} ({problem.hint})"


def _end_column(place: Place) -> int:
    return place.col + max(1, place.width)


class CheckInfo(NamedTuple):
    summary: str  # what is wrong, in one sentence
    severity: Severity = "error"


def all_checks() -> dict[str, CheckInfo]:
    infos = {name: CheckInfo(text) for name, text in READING_CHECKS.items()}
    for name, check in CHECKS.items():
        summary = check.page.partition("\n")[0]
        infos[name] = CheckInfo(summary, check.severity)
    return infos


# -- SARIF ----------------------------------------------------------------------------------------


def _sarif(problems: Sequence[Problem], root: Path) -> str:
    results = [_result(problem, root) for problem in problems]
    rules = []
    for check, info in all_checks().items():
        rule = {
            "id": check,
            "shortDescription": {"text": _message(info.summary)},
            "help": {"text": f"More: gradsurgeon explain {check}"},
        }
        rules.append(rule)
    driver = {"name": "gradsurgeon", "semanticVersion": VERSION, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(problem: Problem, root: Path) -> dict[str, object]:
    # A result has no fingerprints: GitHub computes those of a file that has none.
    return {
        "ruleId": problem.check,
        "level": problem.severity,
        "message": {"text": _message(_message_and_hint(problem))},
        "locations": [{"physicalLocation": _location(problem.place, root)}],
    }


def _message(text: str) -> str:
    return printable(text).replace("{", "{{").replace("}", "}}").replace("](", "\\](")


def _location(place: Place, root: Path) -> dict[str, object]:
    path = _path_from(root, place.file)
    uri = quote(os.fsencode(path), safe="/~")
    if Path(path).is_absolute():
        uri = Path(path).as_uri()
    location: dict[str, object] = {"artifactLocation": {"uri": uri}}
    if place.line:
        location["region"] = {
            "startLine": place.line,
            "startColumn": place.col,
            "endColumn": _end_column(place),
        }
    return location
