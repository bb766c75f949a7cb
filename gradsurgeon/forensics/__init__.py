"""Finds out where what is not finite was born: a failed step is run again under probes."""

from gradsurgeon.forensics.bundle_reading import check, read
from gradsurgeon.forensics.bundle_writing import with_bundle
from gradsurgeon.forensics.diagnose import diagnose

__all__ = ["check", "diagnose", "read", "with_bundle"]
