"""The problems of one document, a file or plain Python data, without its includes."""

import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gradsurgeon.actions import Flaw, Rule, check_rule, described
from gradsurgeon.errors import Place, Problem, did_you_mean
from gradsurgeon.packs import PREFIX
from gradsurgeon.schema._version import FORMAT, VERSION, meets
from gradsurgeon.source import Document, Path

_TOP_LEVEL = ("version", "requires", "include", "rules")
MAX_PROBLEMS = 100  # of one severity: no reader needs more, and the log of a job stays short
_MAX_HINTS = 50  # on unknown keys: each search takes time


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
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
        return Place(f"{self.file} {''.join(steps).lstrip('.')}".strip(), 0, 0)

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
    version, requires = data.get("version"), data.get("requires")
    if isinstance(requires, str) and meets(VERSION, requires) is False:
        message = f"these rules require gradsurgeon {requires[:60]}, this is {VERSION}"
        hint = "install a gradsurgeon that meets it"
        return Problem(source.place(("requires",)), "unmet-requirement", message, hint)
    if isinstance(version, int) and version > FORMAT:
        message = f"this is version {version} of the rule language, gradsurgeon {VERSION} reads version {FORMAT}"
        hint = "upgrade gradsurgeon"
        return Problem(source.place(("version",)), "bad-version", message, hint)
    return None


def top_level(source: Located, data: Mapping[str, object]) -> Iterator[Problem]:
    meant: set[str] = set()
    examples = {
        "version": f"begin the file with `version: {FORMAT}`",
        "rules": "write `rules:` with a list of rules below, each beginning with `- id: ...`",
    }
    unknown = 0
    for key, value in data.items():
        if key not in _TOP_LEVEL:
            unknown += 1
            hint = ""
            if unknown <= _MAX_HINTS:
                hint = did_you_mean(str(key), [one for one in _TOP_LEVEL if one not in data])
            meant.update(hint.split("`")[1:2])
            hint = hint or f"known: {', '.join(_TOP_LEVEL)}"
            message = f"unknown key `{str(key)[:60]}`"
            yield Problem(source.key_place((key,)), "unknown-key", message, hint)
        elif value is None:
            hint = examples.get(key, "remove the key")
            yield Problem(source.key_place((key,)), "wrong-type", f"`{key}` has no value", hint)
        else:
            yield from _values(source, key, value)
    missing = {"version": "the meaning of a rule file is frozen per version"}
    if not data.get("include"):
        missing["rules"] = "there is nothing to do"
    for key, reason in missing.items():
        if key not in data and key not in meant:
            message = f"missing key `{key}`: {reason}"
            yield Problem(source.missing_place(()), "missing-key", message, examples[key])


def _values(source: Located, key: str, value: object) -> Iterator[Problem]:
    place, found = source.place((key,)), described(value)
    if key == "version" and (value != FORMAT or type(value) is not int):
        message = f"`version` must be the number {FORMAT}, found {found}"
        yield Problem(place, "bad-version", message, f"write `version: {FORMAT}`")
    if key == "requires" and (not isinstance(value, str) or meets(VERSION, value) is None):
        message = f"`requires` must be a text with comparisons, found {found}"
        yield Problem(place, "bad-requires", message, 'such as ">=0.1" or ">=0.1, <0.3"')
    if key in ("rules", "include") and not isinstance(value, list | tuple):
        hint = "begin each rule with `- id: ...`"
        if key == "include":
            hint = f'such as `include: ["{PREFIX}nan-trap@1"]`'
        yield Problem(place, "wrong-type", f"`{key}` must be a list, found {found}", hint)
    elif key == "rules" and not value:
        hint = 'a rule is `- {id: my-rule, action: norm-log, params: "*"}`'
        yield Problem(place, "no-rules", "the list of rules is empty", hint)
    elif key == "include" and not value:
        yield Problem(place, "bad-include", "the list of includes is empty", "remove the key")


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
    if flaw.missing:
        place = source.missing_place(path[:-1])
    else:
        place = source.key_place(path) if flaw.key else source.place(path)
    return Problem(place, flaw.check, flaw.message, flaw.hint)


def tidy(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems in the order of the file, without mere echoes of other problems."""
    misread = {problem.place for problem in problems if problem.check.startswith("yaml-")}

    def echoes(problem: Problem) -> bool:
        # The wrong type of a value with a YAML problem of its own is noise.
        return problem.place in misread and not problem.check.startswith("yaml-")

    # Two aliases of one mapping repeat its problems.
    kept = [problem for problem in dict.fromkeys(problems) if not echoes(problem)]
    return sorted(kept, key=lambda problem: (problem.place.line, problem.place.col))


def bounded(problems: Sequence[Problem]) -> list[Problem]:
    """Return the first problems of each severity, in order, and then the number of further problems."""
    seen: Counter[str] = Counter()
    kept: list[Problem] = []
    first: dict[str, Problem] = {}  # the first omitted problem of each severity
    for problem in problems:
        seen[problem.severity] += 1
        if seen[problem.severity] <= MAX_PROBLEMS:
            kept.append(problem)
        else:
            first.setdefault(problem.severity, problem)
    for severity, problem in first.items():
        more = seen[severity] - MAX_PROBLEMS
        message = f"and {more} more {severity}{'' if more == 1 else 's'}, from here on"
        kept.append(
            replace(problem, check="too-large", message=message, hint="correct these first")
        )
    return kept
