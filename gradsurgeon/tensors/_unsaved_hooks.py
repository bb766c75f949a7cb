"""Hooks on modules that stay behind when the script copies or saves the module."""

import weakref
from collections import OrderedDict
from typing import Any

from torch.utils.hooks import RemovableHandle


class _Copied:
    """Reduces a table of hooks, for copies and saved files, to the entries of the script, as its ``__reduce__``."""

    def __init__(self, table: OrderedDict[int, Any]) -> None:
        self._table = weakref.ref(table)
        self.ours = set[int]()

    def __call__(self) -> tuple[Any, ...]:
        table = self._table()
        theirs = []
        if table is not None:
            for hook_id, entry in table.items():
                if hook_id not in self.ours:
                    theirs.append((hook_id, entry))
        return type(table), (), None, None, iter(theirs)


def _tables(handle: RemovableHandle) -> list[OrderedDict[int, Any]]:
    tables = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    return [table for table in tables if table is not None]


def leave_behind(handle: RemovableHandle) -> None:
    """Keep a hook out of copies of its module and out of files."""
    for table in _tables(handle):
        copied = vars(table).setdefault("__reduce__", _Copied(table))
        copied.ours.add(handle.id)


def take_off(handle: RemovableHandle) -> None:
    """Remove a hook from its module; the last hook of ours also removes the ``__reduce__`` of the table."""
    tables = _tables(handle)
    handle.remove()
    for table in tables:
        copied = vars(table)["__reduce__"]
        copied.ours.discard(handle.id)
        if not copied.ours:
            del vars(table)["__reduce__"]


def has_others(module: Any) -> bool:
    """Tell whether a module has hooks that are not ours."""
    for name, table in vars(module).items():
        if name.endswith("_hooks") and isinstance(table, OrderedDict):
            ours = getattr(vars(table).get("__reduce__"), "ours", ())
            if len(table) > len(ours) and "state_dict" not in name:
                return True
    return False
