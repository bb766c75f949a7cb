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
    Examination,
    Observer,
    Spikes,
)
from gradsurgeon.actions._fields import Direction, Flaw, Stricter, described, written
from gradsurgeon.actions._kinds import (
    CaptureRule,
    CheckRule,
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
    "CheckRule",
    "Combination",
    "Comparison",
    "Decision",
    "Direction",
    "Edit",
    "EditRule",
    "Examination",
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


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

# The actions of gradsurgeon; `known_actions` also has the user's own.
ACTIONS: dict[str, type[Rule]] = dict(known_actions)
