"""Rules for gradients, as a file that a team reviews like code.

    session = gradsurgeon.apply(model, "rules.yaml")

Importing this package does not import torch: `gradsurgeon lint` must start fast and run without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurgeon import report as report
    from gradsurgeon.actions import At as At
    from gradsurgeon.actions import CaptureRule as CaptureRule
    from gradsurgeon.actions import CheckRule as CheckRule
    from gradsurgeon.actions import Decision as Decision
    from gradsurgeon.actions import Edit as Edit
    from gradsurgeon.actions import EditRule as EditRule
    from gradsurgeon.actions import Examination as Examination
    from gradsurgeon.actions import Example as Example
    from gradsurgeon.actions import FreezeRule as FreezeRule
    from gradsurgeon.actions import LossRule as LossRule
    from gradsurgeon.actions import Observer as Observer
    from gradsurgeon.actions import ObserverRule as ObserverRule
    from gradsurgeon.actions import Shard as Shard
    from gradsurgeon.actions import TrapRule as TrapRule
    from gradsurgeon.actions.capture import Capture as Capture
    from gradsurgeon.actions.centralize import Centralize as Centralize
    from gradsurgeon.actions.check_loop import CheckLoop as CheckLoop
    from gradsurgeon.actions.check_ranks import CheckRanks as CheckRanks
    from gradsurgeon.actions.check_structure import CheckStructure as CheckStructure
    from gradsurgeon.actions.check_update import CheckUpdate as CheckUpdate
    from gradsurgeon.actions.checks.base import Check as Check
    from gradsurgeon.actions.checks.base import Finding as Finding
    from gradsurgeon.actions.clamp import Clamp as Clamp
    from gradsurgeon.actions.clip_norm import ClipNorm as ClipNorm
    from gradsurgeon.actions.combine import Combine as Combine
    from gradsurgeon.actions.conflict import Conflict as Conflict
    from gradsurgeon.actions.freeze import Freeze as Freeze
    from gradsurgeon.actions.mask import Mask as Mask
    from gradsurgeon.actions.nan_trap import NanTrap as NanTrap
    from gradsurgeon.actions.noise import Noise as Noise
    from gradsurgeon.actions.norm_log import NormLog as NormLog
    from gradsurgeon.actions.perturb import Perturb as Perturb
    from gradsurgeon.actions.sanitize import Sanitize as Sanitize
    from gradsurgeon.actions.scale import Scale as Scale
    from gradsurgeon.actions.spike_trap import SpikeTrap as SpikeTrap
    from gradsurgeon.actions.zero import Zero as Zero
    from gradsurgeon.api import apply as apply
    from gradsurgeon.api import backward as backward
    from gradsurgeon.api import load as load
    from gradsurgeon.api import open_run as open_run
    from gradsurgeon.api import plan as plan
    from gradsurgeon.api import remove as remove
    from gradsurgeon.api import replay as replay
    from gradsurgeon.api import tag as tag
    from gradsurgeon.common.diagnosis import Diagnosis as Diagnosis
    from gradsurgeon.common.events import Event as Event
    from gradsurgeon.common.events import RuleStatus as RuleStatus
    from gradsurgeon.errors import BindError as BindError
    from gradsurgeon.errors import CheckError as CheckError
    from gradsurgeon.errors import GradientSpikeError as GradientSpikeError
    from gradsurgeon.errors import GradSurgeonError as GradSurgeonError
    from gradsurgeon.errors import GradSurgeonWarning as GradSurgeonWarning
    from gradsurgeon.errors import ManifestError as ManifestError
    from gradsurgeon.errors import ModelError as ModelError
    from gradsurgeon.errors import NonFiniteGradientError as NonFiniteGradientError
    from gradsurgeon.errors import RecordError as RecordError
    from gradsurgeon.errors import RuleFileError as RuleFileError
    from gradsurgeon.errors import TrapError as TrapError
    from gradsurgeon.language.planning import Binding as Binding
    from gradsurgeon.language.planning import Manifest as Manifest
    from gradsurgeon.language.planning import Plan as Plan
    from gradsurgeon.language.schema import RuleSet as RuleSet
    from gradsurgeon.report import Report as Report
    from gradsurgeon.report.comparison import compare as compare
    from gradsurgeon.report.comparison.comparison import Comparison as Comparison
    from gradsurgeon.report.run import Run as Run
    from gradsurgeon.runtime.session import Session as Session
    from gradsurgeon.tensors import statistics as statistics
    from gradsurgeon.tensors.statistics import Statistic as Statistic
    from gradsurgeon.tensors.statistics import add_statistic as add_statistic

# Modules are imported when a name of theirs is first asked for.
_NAMES = {
    "actions": "At CaptureRule CheckRule Decision Edit EditRule Examination Example FreezeRule LossRule Observer ObserverRule "
    "Shard TrapRule Capture Centralize CheckLoop CheckRanks CheckStructure CheckUpdate Clamp ClipNorm Combine Conflict Freeze "
    "Mask NanTrap Noise NormLog Perturb Sanitize Scale SpikeTrap Zero",
    "actions.checks.base": "Check Finding",
    "report.comparison": "compare",
    "report.comparison.comparison": "Comparison",
    "common.diagnosis": "Diagnosis",
    "api": "apply backward load open_run plan remove replay tag",
    "errors": "BindError CheckError GradSurgeonError GradSurgeonWarning GradientSpikeError ManifestError ModelError "
    "NonFiniteGradientError RecordError RuleFileError TrapError",
    "common.events": "Event RuleStatus",
    "language.planning": "Binding Manifest Plan",
    "report": "Report",
    "language.schema": "RuleSet",
    "runtime.session": "Session",
    "tensors.statistics": "Statistic add_statistic",
    "report.run": "Run",
}
# Modules that are reached by a short name.
_MODULES = {"report": "report", "statistics": "tensors.statistics"}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_MODULE_OF, "report"])  # noqa: PLE0605 # a list


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("gradsurgeon.language.schema").VERSION
    if name in _MODULES:
        return import_module(f"gradsurgeon.{_MODULES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradsurgeon' has no attribute {name!r}")
    return getattr(import_module(f"gradsurgeon.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
