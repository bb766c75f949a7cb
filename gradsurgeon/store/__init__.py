"""Where measurements live: in memory, and in run directories. No torch.

What needs SQLite is imported from where it is, `store.writer` and `store.run`: a session that keeps
its records in memory works on a Python that was built without it.
"""

from gradsurgeon.store.lookup import Logged, Lookup, Names
from gradsurgeon.store.memory import MEMORY_LIMIT, Key, Measured, Records, Row, Series, merged

__all__ = [
    "MEMORY_LIMIT",
    "Key",
    "Logged",
    "Lookup",
    "Measured",
    "Names",
    "Records",
    "Row",
    "Series",
    "merged",
]
