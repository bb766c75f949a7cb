"""Names that the script gives to its objects."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from traceback import walk_stack
from types import FrameType

_OURS = __file__.rpartition("common")[0]
# Names that say less than the class of a model.
_GENERIC = frozenset({"model", "net", "network", "module", "root", "value", "self", "m", "x"})


def variable_of(is_wanted: Callable[[object], bool]) -> str:
    """Return the variable of the running script that holds a wanted object, empty if only a generic one does.

    The outermost call decides, so a helper function that got the object as an argument does not.
    """
    name = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # `inspect.stack` reads source files
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            held = _held_in(frame, is_wanted)
            if held:
                name = held
        frame = frame.f_back
    return name


def running_lines() -> Iterator[tuple[str, int]]:
    """Yield the lines of the script that run now, as `file:line`, innermost first, each with its level for a warning."""
    torch = str(sys.modules["torch"].__file__).removesuffix("__init__.py")
    # The last two call us when a model is gone, and when a session is closed.
    others = (_OURS, torch, weakref.__file__, contextlib.__file__)
    stack = walk_stack(sys._getframe(1))  # noqa: SLF001 # `inspect.stack` reads source files
    for level, (frame, line) in enumerate(stack, 1):
        file = frame.f_code.co_filename
        if not file.startswith(others):
            yield f"{file}:{line}", level


def _held_in(frame: FrameType, is_wanted: Callable[[object], bool]) -> str:
    attributes: dict[str, object] = getattr(frame.f_locals.get("self"), "__dict__", {})
    for variables in (frame.f_locals, attributes, frame.f_globals):
        for name, value in list(variables.items()):
            is_generic = name in _GENERIC or name.startswith("_")
            if not is_generic and is_wanted(value):
                return name
    return ""
