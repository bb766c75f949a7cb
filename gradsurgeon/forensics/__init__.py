"""Finds the operation that made a NaN or Inf: the failed step is kept, run again under probes, and judged."""

from gradsurgeon.forensics.bundle import check, read, with_bundle
from gradsurgeon.forensics.diagnose import (
    LINE_FOLLOWS,
    LINE_HINT,
    diagnose,
    diagnose_inputs,
    diagnose_loss,
)
from gradsurgeon.forensics.outside_loss import DERIVATIVE
from gradsurgeon.forensics.replay import run_again

__all__ = [
    "DERIVATIVE",
    "LINE_FOLLOWS",
    "LINE_HINT",
    "check",
    "diagnose",
    "diagnose_inputs",
    "diagnose_loss",
    "read",
    "run_again",
    "with_bundle",
]
