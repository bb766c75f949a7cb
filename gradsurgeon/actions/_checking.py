"""Raw options -> rule, with every flaw of the rule in one pass.

pydantic alone stops early: it does not look at what fields mean together while one of them is wrong,
and it knows no place for a key that is not there. So unknown keys and keys without a value are taken
out first, each with its flaw; what is left is validated field by field; and what fields mean together
is judged on the raw options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from gradsurgeon.actions._base import Rule
from gradsurgeon.actions._fields import MAX_FLAWS, Flaw, Path, described, written
from gradsurgeon.actions._methods import METHODS
from gradsurgeon.actions._options import Options
from gradsurgeon.actions._strictness import Stricter
from gradsurgeon.errors import did_you_mean
from gradsurgeon.source import like_bool, like_number

_TYPE_NAMES = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "a text",
    "model_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "{:g} or more"),
    "greater_than": ("gt", "more than {:g}"),
    "less_than": ("lt", "less than {:g}"),
}
# What people write who know other tools, or have not looked the word up.
_MEANT = {
    "name": "id",
    "rule": "id",
    "type": "action",
    "do": "action",
    "match": "params",
    "pattern": "params",
    "patterns": "params",
    "layers": "modules",
    "tasks": "losses",
    "objectives": "losses",
    "aggregator": "method",
    "weighting": "method",
    "start": "from",
    "begin": "from",
    "end": "to",
    "stop": "to",
    "until": "to",
}
_OWN = "an action of your own is written MODULE:NAME"


def check_rule(
    entry: Mapping[Any, Any], actions: Mapping[str, type[Rule]]
) -> tuple[Rule | None, list[Flaw]]:
    kind, flaws = _action_of(entry, actions)
    checker = _RuleChecker(kind, actions)
    options = checker.valid_keys(checker.rule, entry)
    options["action"] = "unknown" if kind is None else kind.name()
    if kind is not None:
        checker.check_together(entry)
    rule = None
    try:
        rule = checker.rule.model_validate(options)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            checker.flaws += checker.flaws_of(error)
        if not (flaws or checker.flaws):  # a rule is never dropped without a word
            raise
    flaws += checker.flaws
    if len(flaws) > MAX_FLAWS:
        message = f"over {MAX_FLAWS} problems in one rule: the rest of it is not looked at"
        flaws[MAX_FLAWS:] = [Flaw("", message, "correct these first", check="too-large")]
    return (None if flaws else rule), flaws


def _keys(model: type[Options]) -> dict[str, Any]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _nested(info: Any) -> type[Options] | None:
    """Return the model of the mapping that is the value of a key; ``None`` where it is none."""
    for annotation in (info.annotation, *get_args(info.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, Options):
            return annotation
    return None


def _action_of(
    entry: Mapping[Any, Any], actions: Mapping[str, type[Rule]]
) -> tuple[type[Rule] | None, list[Flaw]]:
    known = f"known: {', '.join(actions)}"
    key = "action"
    if key not in entry:
        misspelt = [one for one in entry if isinstance(one, str) and _suggestion(one, [key])]
        if not misspelt:
            message, hint = (
                "missing key `action`",
                _beside(entry, actions) or f"add `action`; {known}",
            )
            return None, [Flaw(key, message, hint, missing=True, check="missing-key")]
        key = misspelt[0]  # the walk over the keys says that it is misspelt
    action = entry[key]
    if action is None:
        return None, []
    if not isinstance(action, str):
        message = f"`action` must be the name of an action, found {described(action)}"
        hint = (_beside(action, actions) if isinstance(action, dict) else "") or known
        return None, [Flaw(key, message, hint, check="wrong-type")]
    module, _, name = action.rpartition(":")
    if name in actions and module in ("", actions[name].__module__):
        return actions[name], []
    message = f"unknown action `{action[:60]}`"
    near = did_you_mean(action, actions)
    hint = f"{near} {known}" if near else f"{known}; {_OWN}"
    if module:
        message = f"no module `{module[:60]}` with the action `{name[:60]}` has been imported"
        command = f"gradsurgeon lint --import {module[:60]}"
        hint = f"rule files import nothing: import it before `apply`, or by `{command}`"
    elif action == "clip":  # which does not resemble it most
        hint = f"did you mean `clip-norm`, which bounds a norm, or `clamp`? {known}"
    elif (method := action.lower()) in METHODS:
        hint = f"that is a method of `combine`: write `action: combine` and `method: {method}`; {known}"
    return None, [Flaw(key, message, hint, check="unknown-action")]


def _beside(entry: Mapping[Any, Any], actions: Mapping[str, type[Rule]]) -> str:
    """Return what to write where an action is the key of its options, the other shape of such files."""
    action = next((key for key in entry if key in actions), None)
    return f"write `action: {action}` and the options beside it" if action else ""


def _suggestion(key: str, names: Sequence[str]) -> str:
    meant = _MEANT.get(key)
    return f"did you mean `{meant}`?" if meant in names else did_you_mean(key, names)


class _RuleChecker:
    def __init__(self, kind: type[Rule] | None, actions: Mapping[str, type[Rule]]) -> None:
        self.rule, self.known, self.actions = kind or Rule, kind is not None, actions
        self.flaws: list[Flaw] = []
        # Keys of which enough was said: that they are missing, too, would be noise.
        self.settled: dict[Path, Any] = {}

    def valid_keys(
        self, model: type[Options], given: Mapping[Any, Any], path: Path = ()
    ) -> dict[str, Any]:
        known = _keys(model)
        kept: dict[str, Any] = {}
        for key, value in given.items():
            if len(self.flaws) > MAX_FLAWS:
                break
            if not isinstance(key, str):
                message = f"keys are texts, found {described(key)}"
                self.flaws.append(Flaw(path, message, check="key-type"))
            elif key not in known:
                # It may be an option of the action that was meant.
                if self.known or path:
                    self.note_unknown(model, key, value, path, given)
            elif value is None:
                message, hint = f"`{key}` has no value", "write a value after the colon"
                self.flaws.append(Flaw((*path, key), message, hint, key=True, check="wrong-type"))
                # An object that no check of what fields mean together takes for a value.
                self.settled[(*path, key)] = object()
            else:
                inner = _nested(known[key])
                walked = inner is not None and isinstance(value, dict)
                kept[key] = (
                    self.valid_keys(inner, value, (*path, key)) if inner and walked else value
                )
        return kept

    def note_unknown(
        self, model: type[Options], key: str, value: object, path: Path, given: Mapping[Any, Any]
    ) -> None:
        names = [one for one in _keys(model) if one != "at" or path or self.rule.takes_at]
        owners = [name for name, rule in self.actions.items() if key in _keys(rule)]
        inner = {name: _nested(info) for name, info in _keys(model).items()}
        holders = [name for name, mapping in inner.items() if mapping and key in _keys(mapping)]
        hint = _suggestion(key, [one for one in names if one not in given])
        if hint:
            self.settled[(*path, hint.split("`")[1])] = value
        elif owners and not path:
            hint = f"`{key}` is an option of {' and '.join(owners)}"
        elif holders:
            hint = f"`{key}` is a key of `{holders[0]}`: write `{holders[0]}: {{{key}: ...}}`"
            self.settled.setdefault((*path, holders[0]), {key: value})
        hint = hint or f"known: {', '.join(names)}"
        message = f"unknown key `{key[:60]}`"
        self.flaws.append(Flaw((*path, key), message, hint, key=True, check="unknown-key"))

    def check_together(self, entry: Mapping[Any, Any]) -> None:
        """Note what the keys mean together, but not of keys that are wrong already."""
        meant = {str(path[0]): value for path, value in self.settled.items() if len(path) == 1}
        for flaw in self.rule.flaws({**entry, **meant}):
            key = flaw.path[0] if flaw.path else ""
            if key not in meant and (flaw.missing or key in entry):
                self.flaws.append(flaw)

    def flaws_of(self, error: Mapping[str, Any]) -> Iterator[Flaw]:
        path, context = error["loc"], error.get("ctx", {})
        if error["type"] == "flawed":
            # What the keys of the rule mean together was said by `check_together`.
            flaws = context["flaws"] if path else ()
            for flaw in (one for one in flaws if (*path, *one.path) not in self.settled):
                named = flaw.check in {"wrong-type", "bad-pattern"}
                message = f"`{path[-1]}`: {flaw.message}" if named else flaw.message
                yield replace(flaw, at=(*path, *flaw.path), message=message)
        elif error["type"] != "missing":
            yield self.bad_value(path, error, context)
        elif path not in self.settled:
            meaning = re.split("[.,;]", self.field_at(path).description or "")[0]
            hint = f"add `{path[-1]}`: {meaning[:1].lower()}{meaning[1:]}"
            message = f"missing key `{path[-1]}`"
            yield Flaw(path, message, hint, missing=True, check="missing-key")

    def field_at(self, path: Path) -> Any:
        info, model = None, self.rule
        for step in path:
            if str(step) not in _keys(model):  # an item of a list, or a branch of a union
                break
            info = _keys(model)[str(step)]
            model = _nested(info) or model  # type: ignore[assignment] # any mapping, once inside one
        return info

    def bad_value(self, path: Path, error: Mapping[str, Any], context: Mapping[str, Any]) -> Flaw:
        kind, value, key = error["type"], error["input"], path[-1]
        what = described(value)
        if kind == "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"])
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            expected = context["expected"].replace("'", "`")
            return Flaw(path, f"`{key}` must be {expected}, found {what}", hint)
        if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            return Flaw(path, f"`{key}` must be {words.format(context[name])}, found {what}")
        optional = "" if self.field_at(path).is_required() else f", or leave `{key}` out"
        if kind == "finite_number":
            bounds = any(isinstance(one, Stricter) for one in self.field_at(path).metadata)
            none = f"; for no bound leave `{key}` out" if optional and bounds else ""
            hint = f"numbers reach from -1.8e308 to 1.8e308{none}"
            return Flaw(path, f"`{key}` must be finite, found {what}", hint)
        wanted = _TYPE_NAMES.get(kind)
        if wanted is None:
            return Flaw(path, f"`{key}`: {error['msg'][:1].lower()}{error['msg'][1:]}")
        hint = self.hint_for_type(path, wanted, value) or f"write {wanted}{optional}"
        return Flaw(path, f"`{key}`: expected {wanted}, found {what}", hint, check="wrong-type")

    def hint_for_type(self, path: Path, wanted: str, value: object) -> str:
        if wanted == "a mapping":
            inner = _nested(self.field_at(path))
            return f"its keys are {', '.join(_keys(inner))}" if inner else ""
        if isinstance(value, str):
            return like_bool(value) if wanted == "true or false" else like_number(value)
        if wanted == "a text" and isinstance(value, bool | int | float):
            return f'quote it: "{written(value)}"'
        if path[-1] == "module_type":
            return 'one pattern can list several: "{Linear,Conv2d}"'
        return ""
