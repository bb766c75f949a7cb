"""``gradsurgeon watch``: one screen about a run while it is being written. Never imports torch."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gradsurgeon.cli import fail
from gradsurgeon.cli.options import add_run
from gradsurgeon.cli.report import why_no_page
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.report.report import Report
from gradsurgeon.report.screen import Line, Style, look, screen, status_line
from gradsurgeon.report.web_page import write_page

# While a rank makes its file, and while a file is closed, it looks damaged for a moment.
_RETRY_SECONDS = (0.1, 0.4)
_LEAST_SECONDS = 0.2  # a run is written once per second, and each look takes time from the training
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _PLAIN = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[0m"
_COLOURS: dict[Style, str] = {
    "head": "\x1b[1m",
    "bad": "\x1b[31m",
    "warning": "\x1b[33m",
    "faint": "\x1b[2m",
}
# A page is written anew after so many seconds at least, and so many times as long as it took to write.
_PAGE_SECONDS, _PAGE_SHARE = 5.0, 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--every",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help=f"how often to look, at least {_LEAST_SECONDS}; default: 2",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write the page of `report --html`, anew every few seconds",
    )
    parser.epilog = (
        "The command ends with the run, or when you press Ctrl-C. If standard output is no terminal, or TERM is "
        "`dumb`, it prints one line per look. NO_COLOR turns colours off."
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if _LEAST_SECONDS <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {_LEAST_SECONDS}")


def run(arguments: argparse.Namespace) -> int:
    folder, html = Path(arguments.run), arguments.html
    if html is not None and (reason := why_no_page(html)):
        return fail(reason)
    page = None if html is None else _Page(folder, Path(html))
    try:
        on_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        for report in _looks(folder, page, arguments.every):
            if on_screen:
                columns, rows = shutil.get_terminal_size()
                hint = f"Ctrl-C quits; every {arguments.every:g} s" * _is_running(report)
                _draw(screen(report, columns, rows - 1, hint))
            else:
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {status_line(report)}", flush=True)
        if not on_screen:
            print(*report.head, sep="\n")
    except RecordError as error:
        return fail(str(error))
    except OSError as error:
        if html is None:
            raise
        return fail(f"cannot write {printable(html)}: {error.strerror or error}")
    return 0


class _Page:
    """Writes the page of a run anew, so seldom that it takes little time from the training."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder, self._place = folder, place
        self._next, self._seconds = 0.0, _PAGE_SECONDS

    def update(self, *, is_running: bool) -> None:
        begin = time.monotonic()
        if is_running and begin < self._next:
            return
        # The last one is there to stay.
        seconds = self._seconds if is_running else None
        write_page([self._folder], self._place, reload_seconds=seconds)
        end = time.monotonic()
        self._seconds = max(_PAGE_SECONDS, _PAGE_SHARE * (end - begin))
        self._next = end + self._seconds


def _looks(folder: Path, page: _Page | None, every: float) -> Iterator[Report]:
    """Yield the run as it is, again and again until it has ended."""
    while True:
        report = _look(folder)
        yield report
        if page is not None:
            page.update(is_running=_is_running(report))
        if not _is_running(report):
            return
        time.sleep(every)


def _is_running(report: Report) -> bool:
    return report.ended is not None and report.ended.state == "running"


def _look(folder: Path) -> Report:
    for seconds in _RETRY_SECONDS:
        try:
            return look(folder)
        except RecordError:
            time.sleep(seconds)
    return look(folder)


def _draw(lines: Sequence[Line]) -> None:
    """Show lines in place of those on the terminal."""
    colours = {} if os.environ.get("NO_COLOR") else _COLOURS
    drawn = (
        f"{colours[line.style]}{line.text}{_PLAIN}" if line.style in colours else line.text
        for line in lines
    )
    rows = "".join(f"{text}{_CLEAR_LINE}\n" for text in drawn)
    print(f"{_HOME}{rows}{_CLEAR_BELOW}", end="", flush=True)
