"""The actions: one file each, found by looking into this folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from gradsurgeon.actions._base import (
    POINTS,
    Edit,
    Example,
    Expect,
    Numel,
    Options,
    Point,
    Role,
    Rule,
    Steps,
    Where,
)
from gradsurgeon.actions._checking import check_rule, known_keys, nested
from gradsurgeon.actions._fields import Flaw, found, written

__all__ = [
    "ACTIONS",
    "POINTS",
    "Edit",
    "Example",
    "Expect",
    "Flaw",
    "Numel",
    "Options",
    "Point",
    "Role",
    "Rule",
    "Steps",
    "Where",
    "check_rule",
    "found",
    "known_keys",
    "nested",
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
