"""``gradsurgeon watch``: one screen about a run while it is being written. Never imports torch."""

import argparse
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gradsurgeon.cli import fail
from gradsurgeon.cli.options import add_run
from gradsurgeon.cli.report import runs_inside, why_no_page
from gradsurgeon.cli.terminal import Terminal, can_draw, size
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count
from gradsurgeon.report.live import LiveRun, Snapshot
from gradsurgeon.report.page_file import write_page
from gradsurgeon.report.screen import ending, screen, status_line
from gradsurgeon.store.layout import RUN_FILE

# While a rank makes its file, and while a file is closed, it looks damaged for a moment.
_RETRY_SECONDS = (0.1, 0.4)
_LEAST_SECONDS = 0.2  # a run is written once per second, and each look takes time from the training
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
    parser.add_argument("--once", action="store_true", help="look once, print that and end")
    parser.epilog = (
        "The command ends with the run, or when you press q. If standard output is no terminal, or TERM is "
        "`dumb`, it prints one line per look. NO_COLOR turns colours off."
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if _LEAST_SECONDS <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {_LEAST_SECONDS}")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run)
    if arguments.html is not None and (reason := why_no_page(arguments.html)):
        return fail(reason)
    # `Path.exists` raises in a folder that must not be read.
    if not os.path.exists(folder / RUN_FILE):  # noqa: PTH110
        return fail(_why_not_there(folder))
    try:
        live = LiveRun(folder)
        page = None if arguments.html is None else _Page(folder, Path(arguments.html))
        if arguments.once:
            once = _read(live)
            print("\n".join(line.text for line in screen(once, size()[0])))
            if page is not None:
                page.update(once)
        elif can_draw():
            _watch_on_screen(live, page, arguments.every)
        else:
            _watch_in_lines(live, page, arguments.every)
    except RecordError as error:
        return fail(str(error))
    except OSError as error:
        if arguments.html is None:
            raise
        return fail(f"cannot write {printable(arguments.html)}: {error.strerror or error}")
    return 0


class _Page:
    """Writes the page of a run anew, so seldom that it takes little time from the training."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder, self._place = folder, place
        self._next, self._seconds = 0.0, _PAGE_SECONDS

    def update(self, snapshot: Snapshot) -> None:
        begin = time.monotonic()
        if snapshot.is_running and begin < self._next:
            return
        # The last one is there to stay.
        seconds = self._seconds if snapshot.is_running else None
        write_page([self._folder], self._place, reload_seconds=seconds)
        end = time.monotonic()
        self._seconds = max(_PAGE_SECONDS, _PAGE_SHARE * (end - begin))
        self._next = end + self._seconds


def _why_not_there(folder: Path) -> str:
    where = printable(str(folder))
    if inside := sorted(runs_inside(folder)):
        example = printable(shlex.quote(str(inside[0])))
        return (
            f"{where}: is no run itself, but holds {count(len(inside), 'run')} of other models or "
            f"processes: watch one of them, such as `gradsurgeon watch {example}`"
        )
    return (
        f"{where}: there is no run ({RUN_FILE}) yet: start the training first, and name the directory of its "
        "`record=` or `--record`"
    )


def _read(live: LiveRun) -> Snapshot:
    for seconds in _RETRY_SECONDS:
        try:
            return live.read()
        except RecordError:
            time.sleep(seconds)
    return live.read()


def _watch_on_screen(live: LiveRun, page: _Page | None, every: float) -> None:
    with Terminal() as terminal:
        keys = "q quits" if terminal.hears_keys else "Ctrl-C quits"

        def show(snapshot: Snapshot) -> None:
            terminal.draw(screen(snapshot, *size(), hint=f"{keys}; every {every:g} s"))

        last = _follow(live, page, show, lambda: terminal.quits_within(every))
    if last is not None:
        for line in screen(last, size()[0]):
            print(line.text)
        print(f"\n{ending(last)}")


def _watch_in_lines(live: LiveRun, page: _Page | None, every: float) -> None:
    def show(snapshot: Snapshot) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {status_line(snapshot)}", flush=True)

    def wait() -> bool:
        time.sleep(every)
        return False

    if (last := _follow(live, page, show, wait)) is not None:
        print(ending(last))


def _follow(
    live: LiveRun,
    page: _Page | None,
    show: Callable[[Snapshot], None],
    quits: Callable[[], bool],
) -> Snapshot | None:
    """Show the run again and again; return it as it was at its end, ``None`` where somebody quits."""
    while True:
        snapshot = _read(live)
        show(snapshot)
        if page is not None:
            page.update(snapshot)
        if not snapshot.is_running:
            return snapshot
        if quits():
            return None
