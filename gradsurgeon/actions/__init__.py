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
    NEVER,
    ByNorm,
    Combination,
    Comparison,
    Decision,
    Edit,
    Examination,
    Observer,
    Spikes,
)
from gradsurgeon.actions._fields import (
    FROM_LIST,
    TARGETS,
    Flaw,
    TargetKind,
    described,
    flawed,
    gradient_pairs,
    spelled,
    written,
)
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

__all__ = [
    "ACTIONS",
    "FROM_LIST",
    "MOMENTS",
    "NEVER",
    "TARGETS",
    "ByNorm",
    "CaptureRule",
    "CheckRule",
    "Combination",
    "Comparison",
    "Decision",
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
    "TargetKind",
    "TrapRule",
    "Where",
    "check_rule",
    "described",
    "flawed",
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
globals().update({rule.__name__: rule for rule in ACTIONS.values()})
