"""Finds the operation that made a NaN or Inf: the failed step is kept, run again under probes, and judged."""

from gradsurgeon.forensics.bundle import check, read, with_bundle
from gradsurgeon.forensics.diagnose import diagnose, diagnose_inputs

__all__ = ["check", "diagnose", "diagnose_inputs", "read", "with_bundle"]
