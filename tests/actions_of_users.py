"""Actions that a test defines, as a user would: later tests must not find them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from gradsurgeon import actions


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Forget the actions that are defined inside."""
    known = dict(actions.known_actions)
    try:
        yield
    finally:
        actions.known_actions.clear()
        actions.known_actions.update(known)


@contextmanager
def third_trap() -> Iterator[ModuleType]:
    """Import the module of a user's own trap anew, which defines its action, and forget it afterwards."""
    with forgotten_afterwards():
        sys.modules.pop("third_trap", None)
        yield importlib.import_module("third_trap")
