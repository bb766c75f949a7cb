"""What a run looked like, as text for a person. No torch: a run read from disk is drawn alike."""

from gradsurgeon.report.report import Report as Report
from gradsurgeon.report.rules_and_events import RuleInfo as RuleInfo
from gradsurgeon.report.sources import from_run as from_run
from gradsurgeon.report.sources import summary as summary
from gradsurgeon.tensors.saliency import grad_cam as grad_cam
