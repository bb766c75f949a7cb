"""The options that differ between two versions of a rule."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from gradsurgeon.actions import Direction, FreezeRule, Options, Rule, Steps, Stricter, TrapRule

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


def protects(rule: Rule) -> bool:
    """Tell whether a rule edits, traps or freezes; other rules only observe."""
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


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
        if isinstance(value, Options):
            plain = value.model_dump(by_alias=True, exclude_defaults=True)
            inner = {f"{name}.{key}": item for key, item in plain.items()}
            options |= {name: plain} if isinstance(value, Steps) else inner
        else:
            options[name] = list(dict.fromkeys(value)) if isinstance(value, tuple) else value
    if rule.target != "params":
        options["tensor"] = str(rule.ref)
    elif rule.takes_at:
        options["at"] = rule.point
    if "where.dtype" in options:
        options["where.dtype"] = options["where.dtype"].removeprefix("torch.")
    return options


def changed_options(old: Rule, new: Rule) -> tuple[OptionChange, ...]:
    """Return the options whose meaning differs, and whether the new value is stricter."""
    before, after = given_options(old), given_options(new)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        first, second = _value(old, before, name), _value(new, after, name)
        if name == "steps":
            change = _change_of_steps(old, new, first, second)
        elif _comparable(first) == _comparable(second):
            continue
        else:
            info = _field(old, name) or _field(new, name)
            change = OptionChange(name, first, second)
            for item in info.metadata if info and old.action == new.action else ():
                if isinstance(item, Stricter):
                    change = OptionChange(name, first, second, *item.compare(first, second))
        if change is not None:
            changes.append(change)
    return tuple(changes)


def _change_of_steps(old: Rule, new: Rule, before: Any, after: Any) -> OptionChange | None:
    fewer, more = old.steps.includes(new.steps), new.steps.includes(old.steps)
    if fewer and more:  # a schedule can be written in several ways
        return None
    judged: tuple[Direction, str] = ("changed", "acts in other steps")
    if old.action != new.action or not protects(old):
        judged = ("changed", "")
    elif fewer:
        judged = ("loosened", "acts in fewer steps")
    elif more:
        judged = ("tightened", "acts in more steps")
    return OptionChange("steps", before, after, *judged)


def _comparable(value: Any) -> Hashable:
    # The order of a list has no effect on what the rule selects.
    return frozenset(value) if isinstance(value, list) else repr(value)


def _value(rule: Rule, options: Mapping[str, Any], name: str) -> Any:
    """Return the given value of an option, or its default if the rule has such an option."""
    info = _field(rule, name)
    if name in options or info is None or info.is_required() or name in _NEVER_FILLED_IN:
        return options.get(name)
    return list(info.default) if isinstance(info.default, tuple) else info.default


def _field(rule: Rule, name: str) -> FieldInfo | None:
    """Return the field of an option, ``None`` if the rule has no such field or mapping."""
    options: Any = rule
    *mappings, key = name.split(".")
    for mapping in mappings:
        options = getattr(options, mapping, None)
    fields = type(options).model_fields if isinstance(options, Options) else {}
    return fields.get(key) or next((info for info in fields.values() if info.alias == key), None)
