"""The problems of one document, a file or plain Python data, without its includes."""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field

from gradsurgeon.actions import (
    FROM_LIST,
    Flaw,
    Options,
    Rule,
    check_rule,
    described,
    flawed,
    read_options,
    spelled,
)
from gradsurgeon.errors import Place, Problem
from gradsurgeon.language.packs import PREFIX
from gradsurgeon.language.source import Document, Path

VERSION = "0.1.0"
FORMAT = 1

_LEAST = re.compile(r">=\s*(\d{1,9}(?:\.\d{1,9}){0,2})")
MAX_PROBLEMS = 100  # no reader needs more, and the log of a job stays short


@dataclass(frozen=True)
class Built:
    """Rules as plain Python data: the place of a value is its path."""

    data: object
    file: str = "<dict>"
    text: str = ""
    problems: tuple[Problem, ...] = ()
    folder: pathlib.Path | None = None

    def place(self, path: Path) -> Place:
        """Return the path, such as ``<dict> rules[2].min``, as a place without a line."""
        return Place(f"{self.file} {spelled(path).lstrip('.')}".strip(), 0, 0)

    key_place = place
    missing_place = place


# Plain data with the place of each value.
Located: TypeAlias = Document | Built


def no_mapping(source: Located) -> list[Problem]:
    if source.data is None and source.problems:
        return list(source.problems)
    message = f"a rule file is a mapping with `version` and `rules`, found {described(source.data)}"
    hint = f"begin the file with `version: {FORMAT}`, then `rules:` and the list of rules"
    problem = Problem(source.place(()), "not-a-mapping", message, hint)
    return tidy([*source.problems, problem])


def refusal(source: Located, data: Mapping[str, object]) -> Problem | None:
    version = data.get("version")
    requires = data.get("requires")
    if isinstance(requires, str) and _release(VERSION) < _least_release(requires):
        message = f"these rules require gradsurgeon {requires[:60]}, this is {VERSION}"
        hint = "install a gradsurgeon that meets it"
        return Problem(source.place(("requires",)), "unmet-requirement", message, hint)
    if isinstance(version, int) and version > FORMAT:
        message = f"this is version {version} of the rule language, gradsurgeon {VERSION} reads version {FORMAT}"
        hint = "upgrade gradsurgeon"
        return Problem(source.place(("version",)), "bad-version", message, hint)
    return None


def _least_release(requirement: str) -> list[int]:
    """Return the least version of a requirement such as ``>=0.1``, nothing for any other text."""
    least = _LEAST.fullmatch(requirement.strip())
    if least is None:
        return []
    return _release(least[1])


def _release(version: str) -> list[int]:
    return list(map(int, version.split(".")))


def _requirement(text: str) -> str:
    if not _least_release(text):
        message = f"`requires` must be a least version, found {described(text)}"
        raise flawed(Flaw("", message, 'such as ">=0.1"'))
    return text


_Items = Annotated[tuple[Any, ...], FROM_LIST]


class _RuleFile(Options):
    """The top level of a rule file, whose rules and includes are read later."""

    # `refusal` has refused later versions.
    version: Annotated[
        int, Field(ge=1, description="Version of the rule language.", examples=[FORMAT])
    ]
    requires: Annotated[str, AfterValidator(_requirement)] | None = None
    include: Annotated[_Items | None, Field(min_length=1, examples=[f'["{PREFIX}nan-trap@1"]'])] = (
        None
    )
    rules: Annotated[
        _Items | None,
        Field(min_length=1, examples=['- {id: my-rule, action: norm-log, params: "*"}']),
    ] = None

    def flaws(self) -> Iterator[Flaw]:
        if self.rules is None and self.include is None:
            message = "missing key `rules`: there is nothing to do"
            hint = "write `rules:` with a list of rules below, each beginning with `- id: ...`"
            yield Flaw("rules", message, hint, "missing-key")


def top_level(source: Located, data: Mapping[str, object]) -> list[Problem]:
    _, flaws = read_options(_RuleFile, data)
    return [problem_of(source, (), flaw) for flaw in flaws]


def duplicate_id(rule_id: str, place: Place, first: Place) -> Problem:
    message = f"the id `{rule_id[:60]}` is used twice, first at {first}"
    hint = "reviews and diffs identify rules by id: rename one of the two rules"
    return Problem(place, "duplicate-rule-id", message, hint)


def rule_at(source: Located, index: int, entry: object) -> tuple[Rule | None, list[Problem]]:
    at: Path = ("rules", index)
    if not isinstance(entry, dict):
        message = f"a rule is a mapping with `id`, `action` and `params`, found {described(entry)}"
        hint = 'such as `- {id: my-rule, action: zero, params: "*.bias"}`'
        return None, [Problem(source.place(at), "wrong-type", message, hint)]
    rule, flaws = check_rule(entry)
    return rule, [problem_of(source, at, flaw) for flaw in flaws]


def problem_of(source: Located, at: Path, flaw: Flaw) -> Problem:
    """Return a flaw of the mapping at a path, with its place."""
    path: Path = (*at, *flaw.path)
    if flaw.is_missing:
        place = source.missing_place(path[:-1])
    elif flaw.is_unknown_key:
        place = source.key_place(path)
    else:
        place = source.place(path)
    return Problem(place, flaw.check, flaw.message, flaw.hint)


def tidy(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems in the order of the file, each once: aliases of one mapping repeat them."""
    misread = {problem.place for problem in problems if _is_of_yaml(problem)}
    kept: dict[Problem, None] = {}
    for problem in problems:
        # The wrong type of a value with a YAML problem of its own is noise.
        if _is_of_yaml(problem) or problem.place not in misread:
            kept[problem] = None
    return sorted(kept, key=lambda problem: (problem.place.line, problem.place.col))


def _is_of_yaml(problem: Problem) -> bool:
    return problem.check.startswith("yaml-")


def bounded(problems: Sequence[Problem]) -> list[Problem]:
    """Return the first problems, in order, and then the number of further problems."""
    kept = list(problems[:MAX_PROBLEMS])
    more = problems[MAX_PROBLEMS:]
    if more:
        message = f"and {len(more)} more problems, from here on"
        kept.append(
            replace(more[0], check="too-large", message=message, hint="correct these first")
        )
    return kept
