"""Pair the rules of two files, and find the options that differ."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from gradsurgeon.actions import Direction, Options, Rule, Steps, Stricter
from gradsurgeon.review.matched_rules import MatchedRules, protects

# If these are not given, their meaning depends on the rule, so no default is filled in.
_NEVER_FILLED_IN = ("at", "tensor", "steps")


@dataclass(frozen=True, slots=True)
class OptionChange:
    name: str  # with dots into mappings: ``where.ndim``
    before: Any  # the value as in a rule file, ``None`` if it is not given
    after: Any
    direction: Direction = "changed"
    meaning: str = ""  # the consequence, if the direction alone does not say it

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "before": self.before,
            "after": self.after,
            "word": self.direction,
            "why": self.meaning,
        }


def given_options(rule: Rule) -> dict[str, Any]:
    """Return the options of a rule that differ from their defaults, as plain values.

    ``at`` and ``tensor`` are always included if the rule uses them: their defaults depend on the rule, and
    writing a default out is no difference.
    """
    options: dict[str, Any] = {"action": rule.action}
    for name, info in type(rule).model_fields.items():
        value = getattr(rule, name)
        if name in {"id", "action", "at", "tensor"} or value == info.default:
            continue
        if isinstance(value, Steps):
            options[name] = _plain(value)
        elif isinstance(value, Options):
            options |= {f"{name}.{key}": item for key, item in _plain(value).items()}
        else:
            options[name] = list(dict.fromkeys(value)) if isinstance(value, tuple) else value
    if rule.target != "params":
        options["tensor"] = str(rule.ref)
    elif rule.takes_at:
        options["at"] = rule.point
    if "where.dtype" in options:
        options["where.dtype"] = options["where.dtype"].removeprefix("torch.")
    return options


def _plain(options: Options) -> dict[str, Any]:
    return options.model_dump(by_alias=True, exclude_defaults=True)


def comparable_options(rule: Rule) -> frozenset[tuple[str, Hashable]]:
    """Return the options of a rule in a form that is equal for equal options."""
    return frozenset((name, _comparable(value)) for name, value in given_options(rule).items())


def _comparable(value: Any) -> Hashable:
    # The order of a list has no effect on what the rule selects.
    return frozenset(value) if isinstance(value, list) else repr(value)


def changed_options(old: Rule, new: Rule) -> tuple[OptionChange, ...]:
    before, after = given_options(old), given_options(new)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        first, second = _value(old, before, name), _value(new, after, name)
        same = _comparable(first) == _comparable(second)
        if name == "steps":  # a schedule can be written in several ways
            same = old.steps.includes(new.steps) and new.steps.includes(old.steps)
        if same:
            continue
        direction, meaning = _judge(old, new, name, first, second)
        changes.append(OptionChange(name, first, second, direction, meaning))
    return tuple(changes)


def _value(rule: Rule, options: Mapping[str, Any], name: str) -> Any:
    info = _field(rule, name)
    if name in options or info is None or info.is_required() or name in _NEVER_FILLED_IN:
        return options.get(name)
    return list(info.default) if isinstance(info.default, tuple) else info.default


def _judge(old: Rule, new: Rule, name: str, before: Any, after: Any) -> tuple[Direction, str]:
    if old.action != new.action:
        return "changed", ""
    if name == "steps" and protects(old):
        return _judge_steps(old.steps, new.steps)
    info = _field(old, name) or _field(new, name)
    for item in info.metadata if info is not None else ():
        if isinstance(item, Stricter):
            return item.compare(before, after)
    return "changed", ""


def _judge_steps(before: Steps, after: Steps) -> tuple[Direction, str]:
    if before.includes(after):
        return "loosened", "acts in fewer steps"
    if after.includes(before):
        return "tightened", "acts in more steps"
    return "changed", "acts in other steps"


def _field(rule: Rule, name: str) -> FieldInfo | None:
    """Return the field of an option, ``None`` if the rule has no such field or mapping."""
    options: Any = rule
    *mappings, key = name.split(".")
    for mapping in mappings:
        options = getattr(options, mapping)
    fields = type(options).model_fields if isinstance(options, Options) else {}
    return fields.get(key) or next((info for info in fields.values() if info.alias == key), None)


@dataclass(frozen=True)
class RulePairs:
    """The rules of both files: ``new_ids`` maps old ids to new ids, ``old_ids`` the other way."""

    before: MatchedRules
    after: MatchedRules
    new_ids: Mapping[str, str]
    old_ids: Mapping[str, str]

    def option_changes(self, old: str, new: str) -> tuple[OptionChange, ...]:
        """Return the options that differ; of an added or removed rule, all options that it gives."""
        if old and new:
            return changed_options(self.before.rules[old], self.after.rules[new])
        rule = self.after.rules[new] if new else self.before.rules[old]
        options = {key: value for key, value in given_options(rule).items() if key != "action"}
        if new:
            return tuple(OptionChange(key, None, value) for key, value in options.items())
        return tuple(OptionChange(key, value, None) for key, value in options.items())


def pair_rules(before: MatchedRules, after: MatchedRules) -> RulePairs:
    """Pair the rules of two files by id, and the remaining ones by equal options, as renamed rules."""
    new_ids = {rule: rule for rule in before.rules if rule in after.rules}
    come: dict[Hashable, list[str]] = {}
    for key, rule in reversed(after.rules.items()):
        if key not in before.rules:
            come.setdefault(comparable_options(rule), []).append(key)
    for key, rule in before.rules.items():
        if key not in after.rules and (ids := come.get(comparable_options(rule))):
            new_ids[key] = ids.pop()
    return RulePairs(before, after, new_ids, {new: old for old, new in new_ids.items()})
