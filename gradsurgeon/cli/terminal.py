"""Drawing on a terminal in place, with plain ANSI sequences, and hearing its keys."""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

from gradsurgeon.report.screen import Line, Style

try:
    import termios
    import tty
except ImportError:  # Windows: keys are not heard there before the end of a line
    KEYS = False
else:
    KEYS = True

# The alternate screen, without a cursor and without wrapping: a character that is wider than it seems
# must not move all the lines below. What was on the terminal before comes back with LEAVE.
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _PLAIN = "\x1b[H", "\x1b[2K", "\x1b[J", "\x1b[0m"
_COLOURS: dict[Style, str] = {
    "head": "\x1b[1m",
    "bad": "\x1b[31m",
    "warning": "\x1b[33m",
    "faint": "\x1b[2m",
}
_LONGEST_WAIT = 0.5
_SIGNALLED = 128  # as a shell reports the end by a signal


def can_draw() -> bool:
    """Return whether standard output is a terminal that lines can be drawn on in place."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def size() -> tuple[int, int]:
    """Return columns and rows of the terminal."""
    return shutil.get_terminal_size((100, 24))


class Terminal:
    """A context in which the terminal shows what is drawn; at its end it is as it was before."""

    def __init__(self) -> None:
        heard = KEYS and sys.stdin is not None and sys.stdin.isatty()
        self._keys = sys.stdin.fileno() if heard else None
        self.hint = "q quits" if heard else "Ctrl-C quits"
        self._colours = {} if os.environ.get("NO_COLOR") else _COLOURS
        self._mode: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        sys.stdout.flush()
        self._handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, _exit)}
        if self._keys is not None:
            # A stopped process would leave the terminal as it is now.
            self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            self._mode = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        _write(ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        _write(LEAVE)
        if self._keys is not None:
            termios.tcsetattr(self._keys, termios.TCSANOW, self._mode)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def draw(self, lines: Sequence[Line]) -> None:
        """Show lines instead of those before; no more than the terminal has, and no longer."""
        colours = [self._colours.get(line.style, "") for line in lines]
        drawn = "\r\n".join(
            f"{_CLEAR_LINE}{colour}{line.text}{_PLAIN if colour else ''}"
            for line, colour in zip(lines, colours, strict=True)
        )
        below = f"\r\n{_CLEAR_BELOW}" if len(lines) < size()[1] else ""
        _write(f"{_HOME}{drawn}{below}")

    def quits_within(self, seconds: float) -> bool:
        """Wait; return whether somebody has pressed `q` meanwhile."""
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            # A signal that comes right before the wait does not end it, and is handled after it.
            wait = min(rest, _LONGEST_WAIT)
            if self._keys is None:
                time.sleep(wait)
            elif select.select([self._keys], [], [], wait)[0]:
                pressed = os.read(self._keys, 1024)
                if b"q" in pressed.lower():
                    return True
                if not pressed:  # the terminal is gone
                    self._keys = None
        return False


def _write(text: str) -> None:
    # Not through `sys.stdout`: a handler of a signal may come in between.
    rest = text.encode(sys.stdout.encoding or "ascii", "backslashreplace")
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(_SIGNALLED + number)
