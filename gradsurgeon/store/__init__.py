"""Where measurements live: in memory, and in run directories. No torch.

What needs SQLite is imported from where it is, `store.writer` and `store.run`: a session that keeps
its records in memory works on a Python that was built without it.
"""

from gradsurgeon.store.lookup import Logged, Lookup, RecordQueries
from gradsurgeon.store.memory import Key, RecordedSeries, Records, WholeSeries, merged

__all__ = [
    "Key",
    "Logged",
    "Lookup",
    "RecordQueries",
    "RecordedSeries",
    "Records",
    "WholeSeries",
    "merged",
]
