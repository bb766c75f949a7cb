"""What differs between two rules, field by field, and whether that lets more through or less."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradsurgeon.actions import Rule, Steps, written

Word = Literal["tightened", "loosened", "changed"]
Judgement = tuple[Word, str]  # and why, which may be empty

# Of lists only the content counts: the order of patterns selects nothing else.
_SETS = ("params", "modules", "tensors", "exclude", "stats")
SELECTION = ("params", "modules", "tensors", "exclude", "where", "model")
_STRICTNESS = ("warn", "skip-step", "raise")


@dataclass(frozen=True, slots=True)
class Field:
    """One option that differs.

    Attributes:
        name: the key, with dots into mappings: ``where.ndim``.
        before: the value as a rule file has it, ``None`` where it is not given.
        after: the same in the new rule.
        word: whether the rule lets less through than before, more, or neither can be said.
        why: what that means where the word alone would not tell, may be empty.
    """

    name: str
    before: Any
    after: Any
    word: Word = "changed"
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {
            "name": self.name,
            "before": self.before,
            "after": self.after,
            "word": self.word,
            "why": self.why,
        }


def given(rule: Rule) -> dict[str, Any]:
    """Return the options of a rule that are not at their defaults, as plain values.

    Defaults that depend on the rule are filled in, so that writing them out is no difference: ``at``
    and ``tensor`` are always there where they mean something.
    """
    found: dict[str, Any] = {"action": rule.action}
    for name, info in type(rule).model_fields.items():
        value = getattr(rule, name)
        if name in {"id", "action", "at", "tensor"} or value == info.default:
            continue
        if name == "where":
            found |= {f"where.{key}": item for key, item in _plain(rule.where).items()}
        elif name == "expect":
            found["expect.params"] = value.params
        elif name == "steps":
            found[name] = _plain(value)
        else:
            found[name] = list(dict.fromkeys(value)) if name in _SETS else value
    if rule.target == "params":
        found["at"] = rule.point
    else:
        found["tensor"] = str(rule.ref)
    if not rule.takes_at:
        found.pop("at", None)
    if "where.dtype" in found:
        found["where.dtype"] = found["where.dtype"].removeprefix("torch.")
    return found


def canonical(rule: Rule) -> dict[str, Hashable]:
    """Return the options of a rule in a form that is equal exactly where `compare` finds no difference."""
    found: dict[str, Hashable] = {}
    for name, value in given(rule).items():
        if name in _SETS:
            default = type(rule).model_fields[name].default
            if not isinstance(default, tuple) or set(default) != set(value):
                found[name] = frozenset(value)
        elif isinstance(value, dict):
            found[name] = tuple(sorted(value.items()))
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    steps = rule.steps
    last = None if steps.to is None else steps.to - 1 - (steps.to - 1 - steps.from_) % steps.every
    found["steps"] = (steps.from_, last, 1 if last == steps.from_ else steps.every)
    return found


def _plain(options: Any) -> dict[str, Any]:
    data: dict[str, Any] = options.model_dump(by_alias=True, exclude_defaults=True)
    return data


def compare(old: Rule, new: Rule) -> tuple[Field, ...]:
    """Return the options that differ, in the order in which rules have them; ids are left aside."""
    before, after = given(old), given(new)
    found = []
    for name in dict.fromkeys((*before, *after)):
        first, second = (_value(rule, data, name) for rule, data in ((old, before), (new, after)))
        if _same(name, first, second) or (name == "steps" and _alike(old.steps, new.steps)):
            continue
        same_action = old.action == new.action
        word, why = _judge(old, new, name, first, second) if same_action else ("changed", "")
        found.append(Field(name, first, second, word, why))
    return tuple(found)


def _value(rule: Rule, data: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option; a default that means something counts as given."""
    if name in data:
        return data[name]
    info = type(rule).model_fields.get(name)
    if info is None or info.is_required() or name in {"at", "tensor", "steps", "optional"}:
        return False if name == "optional" else None
    return list(info.default) if isinstance(info.default, tuple) else info.default


def _same(name: str, first: Any, second: Any) -> bool:
    if name in _SETS and None not in (first, second):
        return set(first) == set(second)
    return bool(first == second)


def _judge(old: Rule, new: Rule, name: str, before: Any, after: Any) -> Judgement:
    """Return whether a change lets less through, and what that means."""
    if name == "steps":
        acts = old.role in ("edit", "trap", "freeze")
        return _steps(old.steps, new.steps) if acts else ("changed", "")
    if name == "factor":
        return _factor(before, after)
    if name in ("optional", "expect.params"):
        return _assertion(name, before, after)
    if name in ("then", "give_up_after", "min", "max", "max_norm"):
        return _threshold(name, before, after)
    return "changed", ""


def _threshold(name: str, before: Any, after: Any) -> Judgement:
    if name == "then":
        return _stricter(_STRICTNESS.index(after) > _STRICTNESS.index(before))
    if name == "give_up_after":
        return _stricter(after < before, "stops sooner", "stops later")
    if None in (before, after):
        return _stricter(before is None)
    return _stricter(after > before if name == "min" else after < before)


def _assertion(name: str, before: Any, after: Any) -> Judgement:
    if name == "optional":
        error = "matching nothing is"
        return _stricter(before, f"{error} an error now", f"{error} no error now")
    if None in (before, after):
        return _stricter(before is None, "it is checked now", "it is no longer checked")
    return "changed", ""


def _stricter(is_so: bool, why: str = "", otherwise: str = "") -> Judgement:  # noqa: FBT001 # a test
    return ("tightened", why) if is_so else ("loosened", otherwise)


def _factor(before: float, after: float) -> Judgement:
    if before * after < 0:
        return "changed", "the sign turns around"
    return _stricter(abs(after) < abs(before), "gradients get smaller", "gradients get larger")


def _steps(before: Steps, after: Steps) -> Judgement:
    if _within(after, before):
        return "loosened", "acts in fewer steps"
    if _within(before, after):
        return "tightened", "acts in more steps"
    return "changed", "acts in other steps"


def _alike(old: Steps, new: Steps) -> bool:
    return _within(old, new) and _within(new, old)


def _within(inner: Steps, outer: Steps) -> bool:
    """Tell whether every step of one schedule is a step of the other."""
    if inner.to is not None and inner.from_ + inner.every >= inner.to:  # a single step
        return outer.due(inner.from_)
    last = inner.to is not None and inner.to - 1 - (inner.to - 1 - inner.from_) % inner.every
    return (
        outer.due(inner.from_)
        and inner.every % outer.every == 0
        and (outer.to is None or (last is not False and outer.due(last)))
    )


def spelled(name: str, value: Any) -> str:
    """Return a value as a rule file spells it; empty for one that is not given."""
    if value is None:
        return ""
    if name in (*_SETS, "model", "where.module_type") and name != "stats":
        texts = [value] if isinstance(value, str) else value
        quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
        return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(value)}]" if isinstance(value, list) else written(value)
