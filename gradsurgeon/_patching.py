"""Functions of torch and Python that are replaced for a while, and how they are put back.

A script may put a wrapper of its own over ours. Putting the original back would then take the wrapper
off as well, so a patch that finds something else in its place stays there and only passes calls on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patch:
    """Calls of a function go through ``around``, which is given the function itself, until `undo`."""

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        # As it is stored: a class keeps a static method as an object that `getattr` would unwrap.
        self._stored = vars(owner).get(name, _ABSENT)
        self.original = original = getattr(owner, name)
        self.active = True

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self._ours = staticmethod(patched) if isinstance(self._stored, staticmethod) else patched
        setattr(owner, name, self._ours)

    def undo(self) -> bool:
        """Put the function back, or only pass calls on where ours was replaced; tell whether it is off.

        One that only passes calls on can be made ``active`` again.
        """
        self.active = False
        if inspect.getattr_static(self._owner, self._name, None) is not self._ours:
            return False
        if self._stored is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._stored)
        return True
