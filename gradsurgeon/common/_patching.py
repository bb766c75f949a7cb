"""Temporary replacements of functions. If a script has wrapped ours, it stays and only forwards calls."""

import functools
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patch:
    """Routes calls of a function through ``around`` until `undo`; ``around`` gets the function itself first."""

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        # Read from `vars`: a class stores a static method as an object that `getattr` would unwrap.
        self._stored = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        self.active = True

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self._ours: Any = patched
        if isinstance(self._stored, staticmethod):
            self._ours = staticmethod(patched)
        setattr(owner, name, self._ours)

    def undo(self) -> bool:
        """Restore the function and return True; if a script replaced ours, forward calls while ``active`` is not set again."""
        self.active = False
        if vars(self._owner).get(self._name, _ABSENT) is not self._ours:
            return False
        if self._stored is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._stored)
        # The two refer to each other, and the patch to its owner.
        self._ours = None
        return True
