"""Opens the debugger at the operation that made a NaN or infinity, for `--pdb`."""

from __future__ import annotations

import bdb
import pdb  # noqa: T100 # the user asked for it
import sys
from collections.abc import Mapping
from typing import Any

from gradsurgeon.diagnosis import Line


def stand_at(operation: str, lines: tuple[Line, ...], scope: Mapping[str, Any]) -> None:
    """Open the debugger in the line of the script that called an operation; the replay goes on afterwards.

    Args:
        operation: its name.
        lines: the lines of the script, innermost last.
        scope: more names for the debugger; the names of the script go before them.

    Raises:
        bdb.BdbQuit: the user quits.
    """
    here = frame = sys._getframe()  # noqa: SLF001 # documented
    place = (lines[-1].file, lines[-1].line) if lines else ("", 0)
    while (frame.f_code.co_filename, frame.f_lineno) != place and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_back is None:
        frame = here  # The backward pass runs no line of the model.
    known = frame.f_locals
    for name, value in {"operation": operation, **scope}.items():
        known.setdefault(name, value)
    at = lines[-1] if lines else "no line of the script"
    print(f"{operation} at {at}: see operation, {', '.join(scope)} (`q` to go on)")  # noqa: T201 # the user asked for it
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
