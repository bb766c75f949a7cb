"""What a run looked like, as text for a person. No torch: a run read from disk is drawn alike."""

from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.report.sources import describe, from_run, summary
from gradsurgeon.tensors.saliency import grad_cam

__all__ = [
    "Report",
    "RuleInfo",
    "describe",
    "from_run",
    "grad_cam",
    "summary",
]
