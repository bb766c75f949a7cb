"""Raw options -> rule, with every flaw of the rule in one pass.

pydantic alone stops early: it does not look at what fields mean together while one of them is wrong,
and it knows no place for a key that is not there. So unknown keys and keys without a value are taken
out first, each with its flaw; what is left is validated field by field; and what fields mean together
is judged on the raw options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from gradsurgeon.actions._base import Rule
from gradsurgeon.actions._fields import MAX_FLAWS, Flaw, as_step, described, written
from gradsurgeon.actions._options import Options
from gradsurgeon.actions._target import TARGETS
from gradsurgeon.errors import did_you_mean
from gradsurgeon.source import looks_like

_NOT_YET_KEYS = ("forensics",)
_TYPE_NAMES = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a text",
    "model": "a mapping",
}
_MAPPINGS = {
    "steps": "steps: {from: 0, to: 100}",
    "where": 'where: {module_type: "Linear"}',
    "numel": "numel: {min: 1, max: 1000}",
    "expect": "expect: {params: 6}",
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
    "start": "from",
    "begin": "from",
    "end": "to",
    "stop": "to",
    "until": "to",
}
_AT = (
    "`step` is right before the update, `backward` as a gradient arrives, `accumulated` after the "
    "pass; what happens in forward is the business of rules with `modules`"
)
_OWN = "an action of your own is written MODULE:NAME"
# Stands for a value that was meant but is not there, where only its absence would matter.
_GAP = object()


def check_rule(
    entry: Mapping[Any, Any], actions: Mapping[str, type[Rule]]
) -> tuple[Rule | None, list[Flaw]]:
    """Return the rule that ``entry`` describes, ``None`` where it has flaws, and all its flaws."""
    kind, flaws = _action_of(entry, actions)
    checker = _RuleChecker(kind or Rule, actions, strict=kind is not None)
    options = checker.valid_keys(checker.rule, entry)
    flaws += (
        flaw for flaw in checker.flaws if flaw.missing is False or flaw.at not in checker.settled
    )
    options["action"] = "unknown" if kind is None else kind.name()
    rule = None
    try:
        rule = checker.rule.model_validate(options)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            flaws += checker.flaws_of(error)
    if len(flaws) > MAX_FLAWS:
        message = f"over {MAX_FLAWS} problems in one rule: the rest of it is not looked at"
        flaws[MAX_FLAWS:] = [Flaw("", message, "correct these first", check="too-large")]
    return (None if flaws else rule), flaws


def known_keys(model: type[Options]) -> dict[str, Any]:
    """Return the keys of a mapping as rule files write them, with what is known of each."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def nested(info: Any) -> type[Options] | None:
    """Return the model of the mapping that is the value of a key; ``None`` where it is none."""
    for annotation in (info.annotation, *get_args(info.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, Options):
            return annotation
    return None


def _action_of(
    entry: Mapping[Any, Any], actions: Mapping[str, type[Rule]]
) -> tuple[type[Rule] | None, list[Flaw]]:
    """Return the class of the action that a rule names, or what is wrong with the name."""
    known = f"known: {', '.join(actions)}"
    key = "action"
    if key not in entry:
        near = [one for one in entry if isinstance(one, str) and _suggested(one, ["action"])]
        if not near:
            # The other common shape of such files: the action as the key of its options.
            nester = next((one for one in entry if one in actions), None)
            hint = f"write `action: {nester}` and the options beside it"
            hint = hint if nester else f"add `action`; {known}"
            return None, [
                Flaw(key, "missing key `action`", hint, missing=True, check="missing-key")
            ]
        key = near[0]  # the walk over the keys says that it is misspelt
    action = entry[key]
    if action is None:
        return None, []
    if not isinstance(action, str):
        message = f"`action` must be the name of an action, found {described(action)}"
        nested_in = [one for one in action if one in actions] if isinstance(action, dict) else []
        hint = f"write `action: {nested_in[0]}` and the options beside it" if nested_in else known
        return None, [Flaw(key, message, hint, check="wrong-type")]
    module, _, name = action.rpartition(":")
    if name in actions and module in ("", actions[name].__module__):
        return actions[name], []
    message, hint = _unknown_action(action, actions)
    return None, [Flaw(key, message, hint, check="unknown-action")]


def _unknown_action(action: str, actions: Iterable[str]) -> tuple[str, str]:
    """Return message and hint."""
    module, _, name = action.rpartition(":")
    if module:
        message = f"no module `{module[:60]}` with the action `{name[:60]}` has been imported"
        command = f"gradsurgeon lint --import {module[:60]}"
        return message, f"rule files import nothing: import it before `apply`, or by `{command}`"
    message, known = f"unknown action `{action[:60]}`", f"known: {', '.join(actions)}"
    if action == "clip":  # which does not resemble it most
        return message, f"did you mean `clip-norm`, which bounds a norm, or `clamp`? {known}"
    near = did_you_mean(action, actions)
    return message, f"{near} {known}" if near else f"{known}; {_OWN}"


class _RuleChecker:
    """Takes what cannot be validated out of the options of one rule, and says why.

    Args:
        rule: the class of the action, `Rule` itself where that is not known.
        actions: all actions.
        strict: the action is known, so that all its keys are.
    """

    def __init__(
        self, rule: type[Rule], actions: Mapping[str, type[Rule]], *, strict: bool
    ) -> None:
        self.rule, self.actions, self.strict = rule, actions, strict
        self.flaws: list[Flaw] = []
        # Keys of which enough was said: that they are missing, too, would be noise.
        self.settled: set[str] = set()

    def valid_keys(
        self, model: type[Options], given: Mapping[Any, Any], at: str = ""
    ) -> dict[str, Any]:
        """Return the keys of ``given`` that can be validated as a ``model``."""
        known = known_keys(model)
        kept: dict[str, Any] = {}
        meant: dict[str, Any] = {}
        for key, value in given.items():
            if len(self.flaws) > MAX_FLAWS:
                break
            path = f"{at}{as_step(key) if isinstance(key, str) else key}"
            if key not in known:
                if near := self.note_unknown(key, path, [one for one in known if one not in given]):
                    meant[near] = value
                    self.settled.add(f"{at}{near}")
            elif value is None:
                needed = known[key].is_required() or (self.rule.needs_at and path == "at")
                needed = needed or path in TARGETS
                more = "" if needed or path == "action" else ", or remove the key"
                message, hint = f"`{key}` has no value", f"write a value after the colon{more}"
                self.flaws.append(Flaw(path, message, hint, key=True, check="wrong-type"))
                self.settled.add(path)
                meant[key] = _GAP
            else:
                inner = nested(known[key])
                walked = inner is not None and isinstance(value, dict)
                kept[key] = self.valid_keys(inner, value, f"{path}.") if inner and walked else value
        if self.strict or model is not Rule:
            self.check_together(model, {**kept, **meant}, at, given)
        return kept

    def check_together(
        self, model: type[Options], meant: Mapping[str, Any], at: str, given: Mapping[Any, Any]
    ) -> None:
        """Note what the keys of a mapping mean together, but not of keys that are wrong already."""
        for flaw in model.flaws(meant):
            if flaw.missing or (flaw.at in given and meant.get(flaw.at) is not _GAP):
                self.flaws.append(replace(flaw, at=f"{at}{flaw.at}"))

    def note_unknown(self, key: object, path: str, free: list[str]) -> str:
        """Note a key that does not exist; return the key that was probably meant."""
        if not isinstance(key, str):
            message = f"keys are texts, found {described(key)}"
            self.flaws.append(Flaw(path.rpartition(".")[0], message, check="key-type"))
            return ""
        top = path == as_step(key)
        if top and key in _NOT_YET_KEYS:
            self.flaws.append(_not_yet(key, f"`{key}`", "remove it", key=True))
            return ""
        if top and not self.rule.takes_at:
            free = [one for one in free if one != "at"]
        hint = _suggested(key, free)
        if top and not self.strict:
            option = any(key in known_keys(one) for one in self.actions.values())
            if option or not hint:
                return ""  # it may be an option of the action that was meant
        near = hint.split("`")[1] if hint else ""
        hint = hint or self.hint_for_unknown(key, path)
        message = f"unknown key `{key[:60]}`"
        self.flaws.append(Flaw(path, message, hint, key=True, check="unknown-key"))
        return near

    def hint_for_unknown(self, key: str, path: str) -> str:
        """Return what can be said of a key that resembles none."""
        model: type[Options] = self.rule
        for step in path.split(".")[:-1]:
            model = nested(known_keys(model)[step]) or model
        owners = [name for name, rule in self.actions.items() if key in known_keys(rule)]
        if model is self.rule and owners:
            return f"`{key}` is an option of {' and '.join(owners)}"
        names = [one for one in known_keys(model) if one != "at" or self.rule.takes_at]
        return f"known: {', '.join(names)}"

    def flaws_of(self, error: Mapping[str, Any]) -> Iterator[Flaw]:
        kind, context = error["type"], error.get("ctx", {})
        path = ".".join(map(str, error["loc"]))
        if kind == "flawed":
            for flaw in context["flaws"]:
                named = flaw.check in {"wrong-type", "bad-pattern"}
                message = f"`{error['loc'][-1]}`: {flaw.message}" if named else flaw.message
                yield replace(flaw, at=f"{path}.{flaw.at}".strip("."), message=message)
        elif kind == "missing":
            if path not in self.settled:
                yield self.missing_key(path)
        # What keys mean together was said by `check_together`.
        elif kind != "inconsistent":
            yield self.bad_value(path, error, context)

    def missing_key(self, path: str) -> Flaw:
        info = self.field_at(path)
        key = path.rpartition(".")[2]
        meaning = re.split("[.,;]", info.description or "")[0]
        hint = f"add `{key}`: {meaning[:1].lower()}{meaning[1:]}"
        return Flaw(path, f"missing key `{key}`", hint, missing=True, check="missing-key")

    def field_at(self, path: str) -> Any:
        """Return what is known of the key at the end of ``path``."""
        info, model = None, self.rule
        for step in path.split("."):
            info = known_keys(model)[step]
            model = nested(info) or model  # type: ignore[assignment] # any mapping, once inside one
        return info

    def bad_value(self, path: str, error: Mapping[str, Any], context: Mapping[str, Any]) -> Flaw:
        kind, value = error["type"], error["input"]
        key = path.rpartition(".")[2]
        what = described(value)
        if kind == "literal_error":
            choices = context["expected"].replace("'", "`")
            words = re.findall(r"'([^']*)'", context["expected"])
            hint = did_you_mean(value, words) if isinstance(value, str) else ""
            if len(words) == 1:
                hint = f"leave `{key}` out"
            elif key == "at" and not hint:
                hint = _AT
            return Flaw(path, f"`{key}` must be {choices}, found {what}", hint)
        if kind == "greater_than_equal":
            return Flaw(path, f"`{key}` must be {context['ge']:g} or more, found {what}")
        if kind == "finite_number":
            return Flaw(path, f"`{key}` must be finite, found {what}", self.hint_for_infinite(path))
        wanted = _TYPE_NAMES.get(kind.removesuffix("_type"))
        if wanted is None:
            return Flaw(path, f"`{key}`: {error['msg'][:1].lower()}{error['msg'][1:]}")
        hint = self.hint_for_type(path, kind.removesuffix("_type"), value)
        return Flaw(path, f"`{key}`: expected {wanted}, found {what}", hint, check="wrong-type")

    def hint_for_infinite(self, path: str) -> str:
        key = path.rpartition(".")[2]
        if self.field_at(path).is_required():
            return "numbers reach from -1.8e308 to 1.8e308"
        return f"for no bound leave `{key}` out"

    def hint_for_type(self, path: str, wanted: str, value: object) -> str:
        key = path.rpartition(".")[2]
        if wanted == "model":
            return f"write {_MAPPINGS[key]}"
        if wanted == "bool":
            return (looks_like(value) if isinstance(value, str) else "") or "write true or false"
        if wanted != "string":
            return self.hint_for_number(path, wanted, value)
        if isinstance(value, bool | int | float):
            return f'quote it: "{written(value)}"'
        one_glob = 'one pattern can list several: "{Linear,Conv2d}"'
        return one_glob if key == "module_type" else "write a text"

    def hint_for_number(self, path: str, wanted: str, value: object) -> str:
        if isinstance(value, float) and value.is_integer():
            return f"write {int(value)}"
        key = path.rpartition(".")[2]
        number = "write a number" if wanted == "float" else "write a whole number"
        number += "" if self.field_at(path).is_required() else f", or leave `{key}` out"
        hint = looks_like(value) if isinstance(value, str) else ""
        if hint.endswith((".nan", ".inf")):  # which would be refused in turn
            return f"it must be finite; {self.hint_for_infinite(path)}"
        # `on` looks like a truth value, which is no number either.
        return hint if "number" in hint or re.search(r"write [-+.\d]", hint) else number


def _suggested(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean `x`?``, by likeness or by what the word is for others."""
    known = list(known)
    meant = _MEANT.get(word.casefold())
    return f"did you mean `{meant}`?" if meant in known else did_you_mean(word, known)


def _not_yet(at: str, what: str, hint: str, *, key: bool = False) -> Flaw:
    message = f"{what} is part of the rule language, but not there yet"
    return Flaw(at, message, hint, key=key, check="not-there-yet")
