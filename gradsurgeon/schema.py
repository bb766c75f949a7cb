"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gradsurgeon.actions import ACTIONS, Flaw, Rule, check_rule, found
from gradsurgeon.errors import Place, Problem, RuleFileError, did_you_mean
from gradsurgeon.source import Path

VERSION = "0.1.0"
FORMAT = 1

_TOP_LEVEL = ("version", "requires", "rules")
_NOT_YET_TOP = ("include",)


class Located(Protocol):
    """Plain data that knows where each of its values was written; `source.Document` is one."""

    @property
    def file(self) -> str:
        """Name for messages."""

    @property
    def text(self) -> str:
        """The whole text, empty where there is none."""

    @property
    def data(self) -> object:
        """Plain values."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was wrong with reading it."""

    def place(self, path: Path) -> Place:
        """Return the place of a value."""

    def key_place(self, path: Path) -> Place:
        """Return the place of a key."""

    def missing_place(self, path: Path) -> Place:
        """Return where to point for a key that the mapping at ``path`` lacks."""


@dataclass(frozen=True)
class Built:
    """Rules given as plain Python data: the place of a value is its path."""

    data: object
    file: str = "<dict>"
    text: str = ""
    problems: tuple[Problem, ...] = ()

    def place(self, path: Path) -> Place:
        """Return the path, such as ``<dict> rules[2].min``, as a place without a line."""
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
        return Place(f"{self.file} {''.join(steps).lstrip('.')}".strip(), 0, 0)

    key_place = place
    missing_place = place


@dataclass(frozen=True)
class RuleSet:
    """Validated rules in file order, with the place and the text they come from."""

    rules: tuple[Rule, ...]
    places: Mapping[str, Place] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()
    file: str = "<python>"
    text: str = ""

    def place(self, rule_id: str) -> Place:
        """Return where the rule ``rule_id`` is written."""
        return self.places.get(rule_id, Place(self.file, 0, 0))

    @property
    def sha256(self) -> str:
        """Hash of the text, or of the rules themselves where they were built in Python."""
        text = self.text or "\n".join(rule.model_dump_json() for rule in self.rules)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def from_rules(rules: Sequence[Rule]) -> RuleSet:
    """Return the rule set of rules that were built in Python.

    Raises:
        RuleFileError: an id stands twice, or there are no rules.
    """
    source = Built(None, file="<python>")
    problems = list(_duplicate_ids(source, [(i, rule.id) for i, rule in enumerate(rules)]))
    if not rules:
        problems.append(Problem(source.place(()), "no-rules", "there are no rules"))
    if problems:
        raise RuleFileError(problems)
    places = {rule.id: source.place(("rules", index)) for index, rule in enumerate(rules)}
    return RuleSet(tuple(rules), places)


def validate(source: Located) -> RuleSet:
    """Return the rules of a document.

    Raises:
        RuleFileError: with every problem found, those of reading the text included.
    """
    rules, problems = check(source)
    if any(problem.severity == "error" for problem in problems):
        raise RuleFileError(problems)
    places = {rule.id: source.place(("rules", index, "id")) for index, rule in rules.items()}
    return RuleSet(tuple(rules.values()), places, tuple(problems), source.file, source.text)


def check(source: Located) -> tuple[dict[int, Rule], list[Problem]]:
    """Return the valid rules by index, and all problems sorted by place."""
    if source.data is None and source.problems:
        return {}, list(source.problems)
    if not isinstance(source.data, dict):
        message = f"a rule file is a mapping with `version` and `rules`, found {found(source.data)}"
        hint = f"begin the file with `version: {FORMAT}`, then `rules:` and the list of rules"
        problem = Problem(source.place(()), "not-a-mapping", message, hint)
        return {}, _tidy([*source.problems, problem])
    # A file for another version may mean other things by the same words: nothing else is checked.
    if refusal := _refusal(source, source.data):
        return {}, [refusal]
    problems = [*source.problems, *_top_level(source, source.data)]
    rules: dict[int, Rule] = {}
    entries = source.data.get("rules")
    entries = entries if isinstance(entries, list | tuple) else []
    for index, entry in enumerate(entries):
        rule, flaws = _rule(source, index, entry)
        problems += flaws
        if rule is not None:
            rules[index] = rule
    ids = [(i, entry.get("id")) for i, entry in enumerate(entries) if isinstance(entry, dict)]
    problems += _duplicate_ids(source, ids)
    return rules, _tidy(problems)


def _tidy(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems in the order of the file, without those that only echo another."""
    errors = [problem for problem in problems if problem.severity == "error"]
    wrong = {problem.place for problem in errors}
    misread = {problem.place for problem in errors if problem.check.startswith("yaml-")}

    def echoes(problem: Problem) -> bool:
        # That YAML 1.1 reads a word differently is no news where the word is wrong anyway; nor is
        # the type of a value that YAML did not read as it was meant.
        if problem.severity == "warning":
            return problem.place in wrong
        return problem.place in misread and not problem.check.startswith("yaml-")

    # Two aliases of one mapping have its problems twice.
    kept = [problem for problem in dict.fromkeys(problems) if not echoes(problem)]
    # A refused merge key may have brought every key that is missing.
    if any(problem.check == "merge-key" for problem in kept):
        kept = [problem for problem in kept if problem.check != "missing-key"]
    return sorted(kept, key=lambda problem: (problem.place.line, problem.place.col))


def _refusal(source: Located, data: Mapping[str, object]) -> Problem | None:
    """Return why this gradsurgeon must not read the file, if it must not."""
    version, requires = data.get("version"), data.get("requires")
    if isinstance(requires, str) and meets(VERSION, requires) is False:
        message = f"these rules require gradsurgeon {requires}, this is {VERSION}"
        hint = "install a gradsurgeon that meets it"
        return Problem(source.place(("requires",)), "unmet-requirement", message, hint)
    if isinstance(version, int) and version > FORMAT:
        message = f"this is version {version} of the rule language, gradsurgeon {VERSION} reads version {FORMAT}"
        hint = "upgrade gradsurgeon"
        return Problem(source.place(("version",)), "bad-version", message, hint)
    return None


_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+){0,3})")


def meets(version: str, requirement: str) -> bool | None:
    """Tell whether ``version`` meets ``requirement``; ``None`` where that is no requirement.

    The form is that of Python package requirements, cut down to comparisons of plain releases:
    ``>=0.1, <0.3``.
    """

    def release(text: str) -> tuple[int, ...]:
        numbers = [int(part) for part in text.split(".")]
        return tuple(numbers + [0] * (4 - len(numbers)))

    have, results = release(version), []
    for clause in requirement.split(","):
        match = _CLAUSE.fullmatch(clause.strip())
        if match is None:
            return None
        operator, want = match.group(1), release(match.group(2))
        outcomes = {
            ">=": have >= want,
            "<=": have <= want,
            "==": have == want,
            "!=": have != want,
            ">": have > want,
            "<": have < want,
        }
        results.append(outcomes[operator])
    return all(results)


def _top_level(source: Located, data: Mapping[str, object]) -> Iterator[Problem]:
    meant: set[str] = set()
    examples = {
        "version": f"begin the file with `version: {FORMAT}`",
        "rules": "write `rules:` with a list of rules below, each beginning with `- id: ...`",
    }
    for key, value in data.items():
        if key in _NOT_YET_TOP:
            message = (
                f"`{key}` is part of the rule language, but not there yet in gradsurgeon {VERSION}"
            )
            hint = "copy the rules into this file"
            yield Problem(source.key_place((key,)), "not-there-yet", message, hint)
        elif key not in _TOP_LEVEL:
            hint = did_you_mean(str(key), [one for one in _TOP_LEVEL if one not in data])
            meant.update(hint.split("`")[1:2])
            hint = hint or f"known: {', '.join(_TOP_LEVEL)}"
            message = f"unknown key `{str(key)[:60]}`"
            yield Problem(source.key_place((key,)), "unknown-key", message, hint)
        elif value is None:
            hint = {"requires": "remove the key"}.get(key, examples.get(key, ""))
            yield Problem(source.key_place((key,)), "wrong-type", f"`{key}` has no value", hint)
        else:
            yield from _values(source, key, value)
    missing = {
        "version": "the meaning of a rule file is frozen per version",
        "rules": "there is nothing to do",
    }
    for key, reason in missing.items():
        if key not in data and key not in meant:
            message = f"missing key `{key}`: {reason}"
            yield Problem(source.missing_place(()), "missing-key", message, examples[key])


def _values(source: Located, key: str, value: object) -> Iterator[Problem]:
    """Yield what is wrong with the value of a known key of the top level."""
    place = source.place((key,))
    if key == "version" and (value != FORMAT or type(value) is not int):
        message = f"`version` must be the number {FORMAT}, found {found(value)}"
        yield Problem(place, "bad-version", message, f"write `version: {FORMAT}`")
    if key == "requires" and (not isinstance(value, str) or meets(VERSION, value) is None):
        message = f"`requires` must be a text with comparisons, found {found(value)}"
        yield Problem(place, "bad-requires", message, 'such as ">=0.1" or ">=0.1, <0.3"')
    if key == "rules" and not isinstance(value, list | tuple):
        message = f"`rules` must be a list of rules, found {found(value)}"
        hint = "begin each rule with `- id: ...`"
        yield Problem(place, "wrong-type", message, hint)
    elif key == "rules" and not value:
        hint = 'a rule is `- {id: my-rule, action: norm-log, params: "*"}`'
        yield Problem(place, "no-rules", "the list of rules is empty", hint)


def _duplicate_ids(source: Located, ids: Sequence[tuple[int, object]]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, rule_id in ids:
        if not isinstance(rule_id, str):
            continue
        if rule_id in first:
            place = source.place(("rules", index, "id"))
            where = source.place(("rules", first[rule_id], "id"))
            at = f"on line {where.line}" if where.line else f"at {where}"
            message = f"the id `{rule_id[:60]}` stands twice, first {at}"
            hint = "reviews and diffs go by the id: rename one of the two rules"
            yield Problem(place, "duplicate-rule-id", message, hint)
        first.setdefault(rule_id, index)


def _rule(source: Located, index: int, entry: object) -> tuple[Rule | None, list[Problem]]:
    at: Path = ("rules", index)
    if not isinstance(entry, dict):
        message = f"a rule is a mapping with `id`, `action` and `params`, found {found(entry)}"
        hint = 'such as `- {id: my-rule, action: zero, params: "*.bias"}`'
        return None, [Problem(source.place(at), "wrong-type", message, hint)]
    rule, flaws = check_rule(entry, ACTIONS)
    return rule, [_problem(source, at, flaw) for flaw in flaws]


def _problem(source: Located, at: Path, flaw: Flaw) -> Problem:
    if not flaw.at:
        return Problem(source.place(at), flaw.check, flaw.message, flaw.hint)
    path: Path = (*at, *(int(step) if step.isdigit() else step for step in flaw.at.split(".")))
    if flaw.missing:
        place = source.missing_place(path[:-1])
    else:
        place = source.key_place(path) if flaw.key else source.place(path)
    release = f" in gradsurgeon {VERSION}" if flaw.check == "not-there-yet" else ""
    return Problem(place, flaw.check, flaw.message + release, flaw.hint)
