"""Names that the script gives to its objects."""

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_PACKAGE = __name__.partition(".")[0]
# Names that say less than the class of a model.
_GENERIC = frozenset({"model", "net", "network", "module", "root", "value", "self", "m", "x"})


def variable_of(is_wanted: Callable[[object], bool]) -> str:
    """Return the variable of the running script that holds a wanted object, empty if only a generic one does.

    The outermost call decides, so a helper function that got the object as an argument does not.
    """
    name = ""
    for frame in _script_frames():
        held = _held_in(frame.f_locals, is_wanted)
        if not held:
            held = _held_in(getattr(frame.f_locals.get("self"), "__dict__", {}), is_wanted)
        if not held:
            held = _held_in(frame.f_globals, is_wanted)
        if held:
            name = held
    return name


def _script_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # `inspect.stack` reads source files
    while frame is not None:
        file = frame.f_code.co_filename
        is_ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE
        if not is_ours and not file.startswith(("<", *_LIBRARIES)):
            yield frame
        frame = frame.f_back


def _held_in(variables: Mapping[str, object], is_wanted: Callable[[object], bool]) -> str:
    for name, value in list(variables.items()):
        is_generic = name in _GENERIC or name.startswith("_")
        if not is_generic and is_wanted(value):
            return name
    return ""
