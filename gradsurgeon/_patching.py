"""Functions of torch and Python that are replaced for a while, and how they are put back.

A script may put a wrapper of its own over ours. Putting the original back would then take the wrapper
off as well, so a patch that finds something else in its place stays there and only passes calls on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

_ABSENT = object()


class Patch:
    """Calls of one function that go through ``around`` until `undo`.

    Args:
        owner: the module, class or object that has the function.
        name: of the function.
        around: called in its place, with the function itself and the arguments of the call.
    """

    def __init__(
        self, owner: type | ModuleType | object, name: str, around: Callable[..., Any]
    ) -> None:
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

        wrapped = staticmethod(patched) if isinstance(self._stored, staticmethod) else patched
        self._ours = wrapped
        setattr(owner, name, wrapped)

    def undo(self) -> bool:
        """Put the function back if nobody has replaced ours; pass calls on to it otherwise.

        Returns:
            Whether it is off. One that only passes calls on can be made ``active`` again.
        """
        self.active = False
        if inspect.getattr_static(self._owner, self._name, None) is not self._ours:
            return False
        if self._stored is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._stored)
        return True
