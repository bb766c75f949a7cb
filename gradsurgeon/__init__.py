"""Rules for gradients, as a file that a team reviews like code.

    session = gradsurgeon.apply(model, "rules.yaml")

Importing this package does not import torch: `gradsurgeon lint` must start fast and run without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurgeon import report as report
    from gradsurgeon.actions import (
        CaptureRule,
        Decision,
        Edit,
        EditRule,
        Example,
        FreezeRule,
        Observer,
        ObserverRule,
        TrapRule,
    )
    from gradsurgeon.api import apply, load, open_run, plan, remove, tag
    from gradsurgeon.errors import (
        BindError,
        GradSurgeonError,
        GradSurgeonWarning,
        NonFiniteGradientError,
        RecordError,
        RuleFileError,
    )
    from gradsurgeon.events import Event, RuleStatus
    from gradsurgeon.planning import Binding, Plan
    from gradsurgeon.runtime import Session
    from gradsurgeon.schema import RuleSet
    from gradsurgeon.statistics import Statistic, add_statistic

__all__ = [
    "BindError",
    "Binding",
    "CaptureRule",
    "Decision",
    "Edit",
    "EditRule",
    "Event",
    "Example",
    "FreezeRule",
    "GradSurgeonError",
    "GradSurgeonWarning",
    "NonFiniteGradientError",
    "Observer",
    "ObserverRule",
    "Plan",
    "RecordError",
    "RuleFileError",
    "RuleSet",
    "RuleStatus",
    "Session",
    "Statistic",
    "TrapRule",
    "add_statistic",
    "apply",
    "load",
    "open_run",
    "plan",
    "remove",
    "tag",
]

_HOMES = {
    "actions": (
        "CaptureRule",
        "Decision",
        "Edit",
        "EditRule",
        "Example",
        "FreezeRule",
        "Observer",
        "ObserverRule",
        "TrapRule",
    ),
    "api": ("apply", "load", "open_run", "plan", "remove", "tag"),
    "errors": (
        "BindError",
        "GradSurgeonError",
        "GradSurgeonWarning",
        "NonFiniteGradientError",
        "RecordError",
        "RuleFileError",
    ),
    "events": ("Event", "RuleStatus"),
    "runtime": ("Session",),
    "schema": ("RuleSet",),
    "statistics": ("Statistic", "add_statistic"),
}


def __getattr__(name: str) -> object:
    homes = {member: home for home, members in _HOMES.items() for member in members}
    homes |= {"Binding": "planning", "Plan": "planning"}
    if name == "__version__":
        return import_module("gradsurgeon.schema").VERSION
    if name == "report":
        return import_module("gradsurgeon.report")
    if name not in homes:
        raise AttributeError(f"module 'gradsurgeon' has no attribute {name!r}")
    return getattr(import_module(f"gradsurgeon.{homes[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "report"]
