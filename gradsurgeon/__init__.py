"""Rules for gradients, as a file that a team reviews like code.

    session = gradsurgeon.apply(model, "rules.yaml")

Importing this package does not import torch: `gradsurgeon lint` must start fast and run without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurgeon import report
    from gradsurgeon.actions import (
        CaptureRule,
        CheckRule,
        Decision,
        Edit,
        EditRule,
        Example,
        FreezeRule,
        LossRule,
        Observer,
        ObserverRule,
        TrapRule,
    )
    from gradsurgeon.actions.capture import Capture
    from gradsurgeon.actions.check_loop import CheckLoop
    from gradsurgeon.actions.check_ranks import CheckRanks
    from gradsurgeon.actions.check_structure import CheckStructure
    from gradsurgeon.actions.check_update import CheckUpdate
    from gradsurgeon.actions.clamp import Clamp
    from gradsurgeon.actions.clip_norm import ClipNorm
    from gradsurgeon.actions.combine import Combine
    from gradsurgeon.actions.conflict import Conflict
    from gradsurgeon.actions.freeze import Freeze
    from gradsurgeon.actions.nan_trap import NanTrap
    from gradsurgeon.actions.norm_log import NormLog
    from gradsurgeon.actions.sanitize import Sanitize
    from gradsurgeon.actions.scale import Scale
    from gradsurgeon.actions.spike_trap import SpikeTrap
    from gradsurgeon.actions.zero import Zero
    from gradsurgeon.api import apply, backward, load, open_run, plan, remove, replay, tag
    from gradsurgeon.diagnosis import Diagnosis
    from gradsurgeon.errors import (
        BindError,
        CheckError,
        GradientSpikeError,
        GradSurgeonError,
        GradSurgeonWarning,
        ManifestError,
        ModelError,
        NonFiniteGradientError,
        RecordError,
        RuleFileError,
        TrapError,
    )
    from gradsurgeon.events import Event, RuleStatus
    from gradsurgeon.planning import Binding, Manifest, Plan
    from gradsurgeon.report import Report
    from gradsurgeon.report.run import Run
    from gradsurgeon.schema import RuleSet
    from gradsurgeon.session import Session
    from gradsurgeon.statistics import Statistic, add_statistic

__all__ = [
    "BindError",
    "Binding",
    "Capture",
    "CaptureRule",
    "CheckError",
    "CheckLoop",
    "CheckRanks",
    "CheckRule",
    "CheckStructure",
    "CheckUpdate",
    "Clamp",
    "ClipNorm",
    "Combine",
    "Conflict",
    "Decision",
    "Diagnosis",
    "Edit",
    "EditRule",
    "Event",
    "Example",
    "Freeze",
    "FreezeRule",
    "GradSurgeonError",
    "GradSurgeonWarning",
    "GradientSpikeError",
    "LossRule",
    "Manifest",
    "ManifestError",
    "ModelError",
    "NanTrap",
    "NonFiniteGradientError",
    "NormLog",
    "Observer",
    "ObserverRule",
    "Plan",
    "RecordError",
    "Report",
    "RuleFileError",
    "RuleSet",
    "RuleStatus",
    "Run",
    "Sanitize",
    "Scale",
    "Session",
    "SpikeTrap",
    "Statistic",
    "TrapError",
    "TrapRule",
    "Zero",
    "add_statistic",
    "apply",
    "backward",
    "load",
    "open_run",
    "plan",
    "remove",
    "replay",
    "report",
    "tag",
]

# Modules are imported when a name of theirs is first asked for.
_NAMES = {
    "actions": "CaptureRule CheckRule Decision Edit EditRule Example FreezeRule LossRule Observer ObserverRule TrapRule",
    "actions.capture": "Capture",
    "actions.check_loop": "CheckLoop",
    "actions.check_ranks": "CheckRanks",
    "actions.check_structure": "CheckStructure",
    "actions.check_update": "CheckUpdate",
    "actions.clamp": "Clamp",
    "actions.clip_norm": "ClipNorm",
    "actions.combine": "Combine",
    "actions.conflict": "Conflict",
    "actions.freeze": "Freeze",
    "actions.nan_trap": "NanTrap",
    "actions.norm_log": "NormLog",
    "actions.sanitize": "Sanitize",
    "actions.scale": "Scale",
    "actions.spike_trap": "SpikeTrap",
    "actions.zero": "Zero",
    "diagnosis": "Diagnosis",
    "api": "apply backward load open_run plan remove replay tag",
    "errors": "BindError CheckError GradSurgeonError GradSurgeonWarning GradientSpikeError ManifestError ModelError "
    "NonFiniteGradientError RecordError RuleFileError TrapError",
    "events": "Event RuleStatus",
    "planning": "Binding Manifest Plan",
    "report": "Report",
    "schema": "RuleSet",
    "session": "Session",
    "statistics": "Statistic add_statistic",
    "report.run": "Run",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("gradsurgeon.schema").VERSION
    if name == "report":
        return import_module("gradsurgeon.report")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradsurgeon' has no attribute {name!r}")
    return getattr(import_module(f"gradsurgeon.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
