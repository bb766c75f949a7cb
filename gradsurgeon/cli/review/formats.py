"""Write problems in each format, with a user's text escaped for it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from gradsurgeon.cli.review.checks import CHECKS, READING_CHECKS
from gradsurgeon.errors import Problem, Severity, printable
from gradsurgeon.language.schema import VERSION

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_WORDS: Mapping[str, str] = {"error": "error", "warning": "warning", "note": "notice"}
_COLOURS: Mapping[str, str] = {"error": "\033[1;31m", "warning": "\033[1;33m", "note": "\033[1;36m"}
_RESET = "\033[0m"


def write(
    problems: Sequence[Problem], form: str, *, root: Path | None = None, colour: bool = False
) -> str:
    base = root or Path.cwd()
    if form in ("full", "concise"):
        return "".join(f"{_for_people(problem, form, colour=colour)}\n" for problem in problems)
    lines = {"json": _json, "github": _github, "sarif": _sarif}[form](problems, base)
    return "".join(f"{line}\n" for line in lines)


def _for_people(problem: Problem, form: str, *, colour: bool) -> str:
    text = f"{problem.full()}\n" if form == "full" else problem.concise()
    severity = problem.severity
    lit = f" {_COLOURS[severity]}{severity}:{_RESET}"
    return text.replace(f" {severity}:", lit, 1) if colour else text


def _json(problems: Sequence[Problem], _root: Path) -> Iterator[str]:
    entries = [problem.to_dict() for problem in problems]
    yield json.dumps({"version": 1, "problems": entries}, indent=2)


# -- GitHub ---------------------------------------------------------------------------------------


def _github(problems: Sequence[Problem], root: Path) -> Iterator[str]:
    for problem in problems:
        place = problem.place
        where: dict[str, object] = {"file": _path_from(root, place.file)}
        if place.line:
            end = place.col + max(1, place.width)
            where |= {"line": place.line, "col": place.col, "endColumn": end}
        where["title"] = problem.check
        yield annotation(_WORDS[problem.severity], where, _message_and_hint(problem))


def annotation(word: str, properties: Mapping[str, object], text: str) -> str:
    """Return a command such as ``error``, with escaped arguments that cannot end it."""
    given = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())
    return f"::{word} {given}::{_data(text)}"


def _data(text: str) -> str:
    lines = (printable(line) for line in text.replace("\r\n", "\n").split("\n"))
    return "%0A".join(line.replace("%", "%25").replace("\r", "%0D") for line in lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _path_from(root: Path, file: str) -> str:
    """Return a path relative to ``root``, with slashes; a path outside of it stays as it is."""
    path = Path(file)
    try:
        # Not resolved, because a link is reviewed at its own path.
        return Path(os.path.abspath(path)).relative_to(root).as_posix()  # noqa: PTH100 # `resolve` would follow links
    except ValueError:  # outside of the root, or no path at all
        return path.as_posix()


def _message_and_hint(problem: Problem) -> str:
    return f"{problem.message} ({problem.hint})" if problem.hint else problem.message


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


def _sarif(problems: Sequence[Problem], root: Path) -> Iterator[str]:
    # There are no fingerprints: GitHub computes those of a file that has none.
    results = [
        {
            "ruleId": problem.check,
            "level": problem.severity,
            "message": {"text": _message(_message_and_hint(problem))},
            "locations": [{"physicalLocation": _location(problem, root)}],
        }
        for problem in problems
    ]
    rules = [
        {
            "id": check,
            "shortDescription": {"text": _message(about.summary)},
            "help": {"text": f"More: gradsurgeon explain {check}"},
        }
        for check, about in all_checks().items()
    ]
    driver = {"name": "gradsurgeon", "semanticVersion": VERSION, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    yield json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _message(text: str) -> str:
    return printable(text).replace("{", "{{").replace("}", "}}").replace("](", "\\](")


def _location(problem: Problem, root: Path) -> dict[str, object]:
    place = problem.place
    shown = _path_from(root, place.file)
    uri = quote(os.fsencode(shown), safe="/~")
    if Path(shown).is_absolute():
        uri = Path(shown).as_uri()
    location: dict[str, object] = {"artifactLocation": {"uri": uri}}
    if place.line:
        location["region"] = {
            "startLine": place.line,
            "startColumn": place.col,
            "endColumn": place.col + max(1, place.width),
        }
    return location
