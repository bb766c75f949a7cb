"""Measurements in memory and in run directories. No torch.

Import modules that need SQLite, such as `writer` and `run`, by their own names: a session that
keeps its records in memory works on a Python without SQLite.
"""

from gradsurgeon.records.store.memory import Key, Lookup, Part, RecordQueries, Records, WholeSeries

__all__ = ["Key", "Lookup", "Part", "RecordQueries", "Records", "WholeSeries"]
