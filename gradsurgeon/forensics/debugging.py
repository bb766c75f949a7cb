"""Opens the debugger at the operation that made a NaN or infinity, for `replay --pdb`."""

from __future__ import annotations

import bdb
import pdb  # noqa: T100 # the user asked for it
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from gradsurgeon.diagnosis import Line

_OURS = ("gradsurgeon.*", "torch.*", "contextlib")


def stand_at(operation: str, lines: tuple[Line, ...], scope: Mapping[str, Any]) -> None:
    """Open the debugger in the line of the script that called an operation.

    Args:
        operation: its name.
        lines: the lines of the script, innermost last.
        scope: more names for the debugger; a name that the script uses gets an underscore.

    Raises:
        bdb.BdbQuit: the user quits.
    """
    scope, here = {"operation": operation, **scope}, sys._getframe()  # noqa: SLF001 # documented
    frame = _frame_of(lines[-1]) if lines else None
    if frame is None:
        print(  # noqa: T201 # the user asked for it
            f"{operation} at {lines[-1] if lines else 'no line of the script'}\n"
            f"The backward pass runs no line of the model, so its names cannot be read: see {', '.join(scope)}."
        )
        frame = here
    else:
        scope = {_free(name, frame): value for name, value in scope.items()}
        print(f"{operation} at {lines[-1]}: see {', '.join(scope)}")  # noqa: T201 # the same
    # Only the debugger sees these names: a function keeps its own elsewhere.
    frame.f_locals.update(scope)
    debugger = _Debugger(skip=_OURS, nosigint=True)
    debugger.reset()
    try:
        debugger.interaction(frame, None)
    finally:
        if frame.f_locals is frame.f_globals:
            for name in scope:
                del frame.f_globals[name]
    if debugger.quitting:
        raise bdb.BdbQuit
    if frame is not here:
        debugger.go_on(frame)


def _free(name: str, frame: FrameType) -> str:
    """Return a name, with an underscore behind it if the function uses the name."""
    code = frame.f_code
    own = {*frame.f_locals, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    while name in own:
        name += "_"
    return name


def leave() -> None:
    """Stop the debugger from tracing."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), _Debugger):
        sys.settrace(None)


class _Debugger(pdb.Pdb):
    """A debugger that starts in an outer frame, whose line has not ended yet."""

    def go_on(self, frame: FrameType) -> None:
        """Stop again where the user asked for it: in the next line, or at a breakpoint."""
        if self.stoplineno == -1 and not self.breaks:
            return
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe, outer = outer, outer.f_back
        sys.settrace(self.trace_dispatch)


def _frame_of(line: Line) -> FrameType | None:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 # documented
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (
        line.file,
        line.line,
    ):
        frame = frame.f_back
    return frame
