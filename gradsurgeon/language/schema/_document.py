"""The problems of one document, a file or plain Python data, without its includes."""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq, ge, gt, le, lt, ne
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

_COMPARISONS = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
# Python refuses to read numbers of thousands of digits.
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d{1,9}(?:\.\d{1,9}){0,3})")
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
    if isinstance(requires, str) and meets(VERSION, requires) is False:
        message = f"these rules require gradsurgeon {requires[:60]}, this is {VERSION}"
        hint = "install a gradsurgeon that meets it"
        return Problem(source.place(("requires",)), "unmet-requirement", message, hint)
    if isinstance(version, int) and version > FORMAT:
        message = f"this is version {version} of the rule language, gradsurgeon {VERSION} reads version {FORMAT}"
        hint = "upgrade gradsurgeon"
        return Problem(source.place(("version",)), "bad-version", message, hint)
    return None


def meets(version: str, requirement: str) -> bool | None:
    """Tell whether a version meets a requirement such as ``>=0.1, <0.3``; ``None`` for any other text."""
    clauses = []
    for text in requirement.split(","):
        clause = _CLAUSE.fullmatch(text.strip())
        if clause is None:
            return None
        clauses.append(clause)
    have = _release(version)
    return all(_COMPARISONS[clause[1]](have, _release(clause[2])) for clause in clauses)


def _release(version: str) -> list[int]:
    numbers = [int(part) for part in version.split(".")]
    return numbers + [0] * (4 - len(numbers))


def _requirement(text: str) -> str:
    if meets(VERSION, text) is None:
        message = f"`requires` must be comparisons of versions, found {described(text)}"
        raise flawed(Flaw("", message, 'such as ">=0.1" or ">=0.1, <0.3"'))
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


def top_level(source: Located, data: Mapping[str, object]) -> Iterator[Problem]:
    _, flaws = read_options(_RuleFile, data)
    for flaw in flaws:
        yield _problem(source, (), flaw)


def duplicate_ids(
    source: Located, ids: Sequence[tuple[int, object]], first: dict[str, Place]
) -> Iterator[Problem]:
    for index, rule_id in ids:
        if not isinstance(rule_id, str):
            continue
        place = source.place(("rules", index, "id"))
        where = first.setdefault(rule_id, place)
        if where is not place:
            message = f"the id `{rule_id[:60]}` is used twice, first at {where}"
            hint = "reviews and diffs identify rules by id: rename one of the two rules"
            yield Problem(place, "duplicate-rule-id", message, hint)


def rule_at(source: Located, index: int, entry: object) -> tuple[Rule | None, list[Problem]]:
    at: Path = ("rules", index)
    if not isinstance(entry, dict):
        message = f"a rule is a mapping with `id`, `action` and `params`, found {described(entry)}"
        hint = 'such as `- {id: my-rule, action: zero, params: "*.bias"}`'
        return None, [Problem(source.place(at), "wrong-type", message, hint)]
    rule, flaws = check_rule(entry)
    return rule, [_problem(source, at, flaw) for flaw in flaws]


def _problem(source: Located, at: Path, flaw: Flaw) -> Problem:
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
    return sorted(kept, key=_position)


def _is_of_yaml(problem: Problem) -> bool:
    return problem.check.startswith("yaml-")


def _position(problem: Problem) -> tuple[int, int]:
    return problem.place.line, problem.place.col


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
