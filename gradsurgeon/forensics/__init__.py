"""Finds out where what is not finite was born: a failed step is run again under probes."""

from gradsurgeon.forensics.bundle import read, write
from gradsurgeon.forensics.diagnose import diagnose

__all__ = ["diagnose", "read", "write"]
