"""The actions: one file each. This folder is searched for them, and no list names them."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from gradsurgeon.actions._base import (
    MOMENTS,
    Example,
    Moment,
    Rule,
    check_rule,
    in_order,
    known_actions,
)
from gradsurgeon.actions._effects import (
    ByNorm,
    Combination,
    Comparison,
    Decision,
    Edit,
    Observer,
    Spikes,
)
from gradsurgeon.actions._fields import Direction, Flaw, Stricter, described, written
from gradsurgeon.actions._kinds import (
    CaptureRule,
    EditRule,
    FreezeRule,
    LossRule,
    ObserverRule,
    TrapRule,
)
from gradsurgeon.actions._options import Options, Steps, Where
from gradsurgeon.actions._target import TARGETS, TargetKind, gradient_pairs, spelled

__all__ = [
    "ACTIONS",
    "MOMENTS",
    "TARGETS",
    "ByNorm",
    "CaptureRule",
    "Combination",
    "Comparison",
    "Decision",
    "Direction",
    "Edit",
    "EditRule",
    "Example",
    "Flaw",
    "FreezeRule",
    "LossRule",
    "Moment",
    "Observer",
    "ObserverRule",
    "Options",
    "Rule",
    "Spikes",
    "Steps",
    "Stricter",
    "TargetKind",
    "TrapRule",
    "Where",
    "check_rule",
    "described",
    "gradient_pairs",
    "in_order",
    "known_actions",
    "spelled",
    "written",
]


def _discover() -> dict[str, type[Rule]]:
    actions: dict[str, type[Rule]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{info.name}")
        name = info.name.replace("_", "-")
        if known_actions.get(name, Rule).__module__ != module.__name__:
            raise ImportError(f"{module.__name__} must define the action `{name}`")
        actions[name] = known_actions[name]
    return actions


# The actions of gradsurgeon; `known_actions` also has the user's own.
ACTIONS: dict[str, type[Rule]] = _discover()
