"""The actions: one file each, found by looking into this folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from gradsurgeon.actions._base import (
    MOMENTS,
    POINTS,
    ByNorm,
    Edit,
    Example,
    Moment,
    Point,
    Role,
    Rule,
)
from gradsurgeon.actions._checking import check_rule, known_keys, nested
from gradsurgeon.actions._fields import Flaw, found, steps_of, written
from gradsurgeon.actions._options import Expect, Numel, Options, Steps, Where
from gradsurgeon.actions._strictness import Direction, Stricter
from gradsurgeon.actions._target import TARGETS, TargetKind, TensorRef, spelled

__all__ = [
    "ACTIONS",
    "MOMENTS",
    "POINTS",
    "TARGETS",
    "ByNorm",
    "Direction",
    "Edit",
    "Example",
    "Expect",
    "Flaw",
    "Moment",
    "Numel",
    "Options",
    "Point",
    "Role",
    "Rule",
    "Steps",
    "Stricter",
    "TargetKind",
    "TensorRef",
    "Where",
    "check_rule",
    "found",
    "known_keys",
    "nested",
    "spelled",
    "steps_of",
    "written",
]


def _discover() -> dict[str, type[Rule]]:
    found: dict[str, type[Rule]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{info.name}")
        name = info.name.replace("_", "-")
        class_name = "".join(word.capitalize() for word in info.name.split("_"))
        rule: type[Rule] = getattr(module, class_name)
        if rule.name() != name:
            raise ImportError(f"{module.__name__} must define {class_name} with action `{name}`")
        found[name] = rule
    return found


ACTIONS: dict[str, type[Rule]] = _discover()
