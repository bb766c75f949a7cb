"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError

from gradsurgeon.actions import ACTIONS, Rule
from gradsurgeon.errors import Place, Problem, RuleFileError, did_you_mean
from gradsurgeon.source import Path, looks_like

VERSION = "0.1.0"
FORMAT = 1

_TOP_LEVEL = ("version", "requires", "rules")
_NOT_YET_TOP = ("include",)
_NOT_YET_KEYS = ("modules", "tensors", "model", "when", "forensics")
_NOT_YET_ACTIONS = ("freeze", "sanitize", "clip-norm", "capture")
_TYPE_NAMES = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a text",
    "model": "a mapping",
    "dict": "a mapping",
}


class Located(Protocol):
    """Plain data that knows where each of its values was written; `source.Document` is one."""

    @property
    def file(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def data(self) -> object: ...
    @property
    def problems(self) -> tuple[Problem, ...]: ...
    def place(self, path: Path) -> Place: ...
    def key_place(self, path: Path) -> Place: ...
    def missing_place(self, path: Path) -> Place: ...


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
    problems = list(source.problems)
    if source.data is None and problems:
        return {}, problems
    if not isinstance(source.data, dict):
        message = f"a rule file is a mapping with `version` and `rules`, found {_kind(source.data)}"
        problems.append(Problem(source.place(()), "not-a-mapping", message))
        return {}, problems
    # A file for another version may mean other things by the same words: nothing else is checked.
    refusal = list(_requirements(source, source.data))
    if refusal:
        return {}, [*problems, *refusal]
    problems += _top_level(source, source.data)
    rules: dict[int, Rule] = {}
    entries = source.data.get("rules")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        rule, found = _rule(source, index, entry)
        problems += found
        if rule is not None:
            rules[index] = rule
    problems += _duplicate_ids(source, _ids(entries))
    return rules, sorted(problems, key=lambda problem: (problem.place.line, problem.place.col))


def _requirements(source: Located, data: Mapping[str, object]) -> Iterator[Problem]:
    version, requires = data.get("version"), data.get("requires")
    if version is None:
        message = "missing key `version`: the meaning of a rule file is frozen per version"
        place = source.missing_place(())
        yield Problem(place, "missing-key", message, f"begin the file with `version: {FORMAT}`")
    elif version != FORMAT or not isinstance(version, int) or isinstance(version, bool):
        message = f"version {version!r} is not one that gradsurgeon {VERSION} reads"
        place = source.place(("version",))
        yield Problem(place, "bad-version", message, f"write `version: {FORMAT}`, or upgrade")
    if requires is None:
        return
    place = source.place(("requires",))
    met = meets(VERSION, requires) if isinstance(requires, str) else None
    if met is None:
        message = f"`requires` must be a text such as \">=0.1\", found {_found(requires)}"
        yield Problem(place, "bad-requires", message)
    elif not met:
        message = f"these rules require gradsurgeon {requires}, this is {VERSION}"
        yield Problem(place, "unmet-requirement", message, "install a matching gradsurgeon")


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
    for key in data:
        if key in _NOT_YET_TOP:
            yield _not_yet(source.key_place((key,)), f"`{key}`")
        elif key not in _TOP_LEVEL:
            yield _unknown_key(source, (key,), _TOP_LEVEL)
    rules = data.get("rules")
    if "rules" not in data:
        yield Problem(source.missing_place(()), "missing-key", "missing key `rules`")
    elif not isinstance(rules, list):
        message = f"`rules` must be a list of rules, found {_kind(rules)}"
        hint = "begin each rule with `- id: ...`"
        yield Problem(source.place(("rules",)), "wrong-type", message, hint)
    elif not rules:
        yield Problem(source.place(("rules",)), "no-rules", "there are no rules")


def _ids(entries: object) -> list[tuple[int, object]]:
    if not isinstance(entries, list):
        return []
    return [(i, entry.get("id")) for i, entry in enumerate(entries) if isinstance(entry, dict)]


def _duplicate_ids(source: Located, ids: Sequence[tuple[int, object]]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, rule_id in ids:
        if not isinstance(rule_id, str):
            continue
        if rule_id in first:
            place = source.place(("rules", index, "id"))
            where = source.place(("rules", first[rule_id], "id"))
            at = f"line {where.line}" if where.line else str(where)
            message = f"the id `{rule_id}` stands twice, first at {at}"
            hint = "reviews and diffs go by the id: rename one of the two rules"
            yield Problem(place, "duplicate-rule-id", message, hint)
        first.setdefault(rule_id, index)


def _rule(source: Located, index: int, entry: object) -> tuple[Rule | None, list[Problem]]:
    at: Path = ("rules", index)
    if not isinstance(entry, dict):
        message = f"a rule is a mapping with `id` and `action`, found {_found(entry)}"
        return None, [Problem(source.place(at), "wrong-type", message)]
    kind = _action(source, at, entry)
    if isinstance(kind, Problem):
        return None, [kind]
    fields = [info.alias or name for name, info in kind.model_fields.items()]
    try:
        rule, errors = kind.model_validate(entry), []
    except ValidationError as error:
        rule, errors = None, error.errors(include_url=False)
    problems = [
        _problem(source, at, error, fields)
        for error in errors
        # Flaws are found below, whether the fields are valid or not.
        if error["type"] != "flaw" and not _stands_for_target(error, entry)
    ]
    problems += _flaws(source, at, entry, kind, fields)
    return (None if problems else rule), problems


def _action(source: Located, at: Path, entry: Mapping[str, object]) -> type[Rule] | Problem:
    action = entry.get("action")
    if action is None:
        near = [key for key in entry if did_you_mean(key, ["action"])]
        hint = f"did you mean `action` by `{near[0]}`?" if near else f"known: {', '.join(ACTIONS)}"
        place = source.key_place((*at, near[0])) if near else source.missing_place(at)
        return Problem(place, "missing-key", "missing key `action`", hint)
    if isinstance(action, str) and action in ACTIONS:
        return ACTIONS[action]
    place = source.place((*at, "action"))
    if action in _NOT_YET_ACTIONS:
        return _not_yet(place, f"the action `{action}`")
    hint = did_you_mean(str(action), ACTIONS)
    hint = f"{hint} known: {', '.join(ACTIONS)}".strip()
    return Problem(place, "unknown-action", f"unknown action {_found(action)}", hint)


def _stands_for_target(error: Mapping[str, Any], entry: Mapping[str, object]) -> bool:
    """Tell whether a missing `params` only means that another target was named."""
    return error["type"] == "missing" and error["loc"] == ("params",) and (
        "modules" in entry or "tensors" in entry
    )


def _flaws(
    source: Located, at: Path, entry: Mapping[str, Any], kind: type[Rule], fields: Sequence[str]
) -> Iterator[Problem]:
    # A misspelt `mim` is reported as such; that `min` is missing would be noise beside it.
    meant = dict(entry)
    for key, value in entry.items():
        if key not in fields and (near := did_you_mean(key, fields)):
            meant.setdefault(near.split("`")[1], value)
    for flaw in kind.flaws(meant):
        path = (*at, flaw.at)
        place = source.missing_place(at) if flaw.missing else source.place(path)
        yield Problem(place, "missing-key" if flaw.missing else "bad-value", flaw.message, flaw.hint)


def _problem(
    source: Located, at: Path, error: Mapping[str, Any], fields: Sequence[str]
) -> Problem:
    kind, loc, context = error["type"], (*at, *error["loc"]), error.get("ctx", {})
    path = (*loc, *context.get("at", ()))
    place = source.place(path)
    key = str(loc[-1])
    if kind == "extra_forbidden":
        if key in _NOT_YET_KEYS:
            return _not_yet(source.key_place(loc), f"`{key}`")
        return _unknown_key(source, loc, fields if len(error["loc"]) == 1 else _siblings(loc))
    if kind == "missing":
        return Problem(source.missing_place(loc[:-1]), "missing-key", f"missing key `{key}`")
    if kind == "literal_error":
        found = _found(error["input"])
        hint = did_you_mean(str(error["input"]), re.findall(r"'([^']*)'", context["expected"]))
        message = f"`{key}` must be {context['expected'].replace(chr(39), '`')}, found {found}"
        return Problem(place, "bad-value", message, hint)
    if kind.removesuffix("_type") in _TYPE_NAMES:
        found = _found(error["input"])
        hint = looks_like(error["input"]) if isinstance(error["input"], str) else ""
        wanted = _TYPE_NAMES[kind.removesuffix("_type")]
        return Problem(place, "wrong-type", f"`{key}`: expected {wanted}, found {found}", hint)
    if kind == "pattern_type":
        message = f"`{key}`: {error['msg']}, found {_found(error['input'])}"
        hint = 'quote it: "*.weight"' if isinstance(error["input"], dict) else ""
        return Problem(place, "wrong-type", message, hint)
    check_id = "bad-pattern" if kind == "bad_pattern" else "bad-value"
    message = error["msg"] if "text" in context else f"`{key}`: {_lower(error['msg'])}"
    return Problem(place, check_id, message, context.get("hint", ""))


def _siblings(loc: Path) -> tuple[str, ...]:
    """Return the keys that may stand beside the nested key at ``loc``."""
    nested = {"steps": ("from", "to", "every"), "numel": ("min", "max"), "expect": ("params",)}
    where = ("module_type", "ndim", "dtype", "numel", "requires_grad")
    return nested.get(str(loc[-2]), where)


def _unknown_key(source: Located, path: Path, known: Sequence[str]) -> Problem:
    key = str(path[-1])
    hint = did_you_mean(key, known) or f"known: {', '.join(known)}"
    return Problem(source.key_place(path), "unknown-key", f"unknown key `{key}`", hint)


def _not_yet(place: Place, what: str) -> Problem:
    message = f"{what} is part of the rule language, but not there yet in gradsurgeon {VERSION}"
    return Problem(place, "not-there-yet", message)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false"}
    return "nothing" if value is None else names.get(type(value), "a number")


def _found(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f'the text "{value[:60]}{"..." if len(value) > 60 else ""}"'  # noqa: PLR2004
        case int() | float():
            return f"the number {value}"
        case _:
            return _kind(value)
