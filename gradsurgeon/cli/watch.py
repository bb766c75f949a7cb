"""``gradsurgeon watch``: the report of a run on one screen while it is being written. Never imports torch."""

import argparse
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gradsurgeon.cli.options import add_page, add_run, is_terminal, writing
from gradsurgeon.common.events import is_trip
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.records.store.layout import RUN_FILE, runs_inside
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report.callouts import whole_name
from gradsurgeon.report.norms import norm_table, ranked
from gradsurgeon.report.ranks import rank_lines
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import by_kind, edits_of, event_groups
from gradsurgeon.report.sources import summary
from gradsurgeon.report.web_page import write_page

# While a rank makes its file, and while a file is closed, it looks damaged for a moment.
_RETRY_SECONDS = (0.1, 0.4)
_LEAST_SECONDS = 0.2  # a run is written once per second, and each look takes time from the training
_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
# The page is written again after this many seconds at least, and after this many times the seconds that writing took.
_PAGE_SECONDS = 5.0
_PAGE_SHARE = 20.0
# The newest rows of each series are in view: fewer rows of a very large model, but enough to tell a spike.
_ROWS_MOST = 256
_ROWS_LEAST = 32
_VALUES = 2**18  # values in view
_WORST = 10  # rows of a table of norms
_ROWS = 8  # rows of another table
_EVENTS = 4  # traps, and as many other events: traps must not hide everything else


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--every",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help=f"how often to look, at least {_LEAST_SECONDS}; default: 2",
    )
    add_page(parser, what="also write the page of `report --html`, anew every few seconds")
    parser.epilog = (
        "The command ends with the run, or when you press Ctrl-C. If standard output is no terminal, or TERM is "
        "`dumb`, it prints one line per look."
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        seconds = float(text)
        if _LEAST_SECONDS <= seconds < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {_LEAST_SECONDS}")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run)
    on_screen = is_terminal()
    next_page = 0.0
    is_running = True
    _wait_for(folder, arguments.every)
    while is_running:
        report = _retried(folder)
        is_running = report.ended is not None and report.ended.state == "running"
        hint = ""
        reload_seconds = 0.0  # The last page stays, and does not reload itself.
        if is_running:
            hint = f"Ctrl-C quits; every {arguments.every:g} s"
            reload_seconds = _PAGE_SECONDS
        if on_screen:
            _draw(report, hint)
        else:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            head = f"{now} {report.head[-1]}"
            parts = [head, _newest_values(report), *rank_lines(report.progress)]
            print("; ".join(part for part in parts if part), flush=True)
        begin = time.monotonic()
        if arguments.html is not None and (begin >= next_page or not is_running):
            with writing(arguments.html):
                write_page([folder], Path(arguments.html), reload_seconds=reload_seconds)
            end = time.monotonic()
            next_page = end + max(_PAGE_SECONDS, _PAGE_SHARE * (end - begin))
        if is_running:
            time.sleep(arguments.every)
    if not on_screen:
        print(*report.head, sep="\n")
    return 0


def _wait_for(folder: Path, every: float) -> None:
    """Wait until a run begins. A file, or a folder of other runs, will not become one."""
    if _exists(folder):
        return
    print(f"waiting for the run {printable(str(folder))} to begin; Ctrl-C quits", flush=True)
    while not _exists(folder):
        time.sleep(every)


def _exists(folder: Path) -> bool:
    """Tell whether there is a run, or what `open_run` refuses for another reason."""
    return folder.is_file() or (folder / RUN_FILE).exists() or bool(runs_inside(folder))


def _retried(folder: Path) -> Report:
    for seconds in _RETRY_SECONDS:
        try:
            return newest_report(folder)
        except RecordError:
            time.sleep(seconds)
    return newest_report(folder)


def newest_report(path: Path) -> Report:
    # Files that are opened anew let ranks join, and the writer finds no reader when it ends the run.
    with open_run(path) as run:
        width = sum(len(series.key.names) for series in run)
        rows = max(_ROWS_LEAST, min(_ROWS_MOST, _VALUES // max(1, width)))
        return summary(run, newest=rows)


def _draw(report: Report, hint: str) -> None:
    """Replace the content of the terminal by a report, and cut the end that does not fit."""
    columns, rows = shutil.get_terminal_size()
    lines = [*screen(report, columns)[: rows - 2], hint[:columns]]
    text = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    print(f"{_HOME}{text}{_CLEAR_BELOW}", end="", flush=True)


def screen(report: Report, columns: int) -> list[str]:
    """Return the lines of a report of the newest rows; longer lines are cut."""
    history = report.history
    sections: list[Iterable[str]] = [_head(report), _events(report), _remarks(report)]
    tables = [table.lines(columns, _ROWS) for table in report.tables]
    losses = len(report.loss_tables)
    sections += tables[:losses]
    for kind in history.kinds:
        urgent = ranked(history.tracks_of(kind))[:_WORST]
        sections.append(norm_table(history, kind, urgent).lines(columns, _WORST))
    wholes = []
    for whole in history.gradients:
        name = whole_name(whole, len(report.params))
        wholes.append(f"{name}: {whole.norms[-1]:.3g} at step {whole.steps[-1]}")
    sections.append(wholes)
    sections += tables[losses + len(history.kinds) :]
    lines: list[str] = []
    for section in sections:
        before = len(lines)
        for line in section:
            fits = len(line) <= columns
            lines.append(line if fits else f"{line[: columns - 1]}…")
        if len(lines) > before:
            lines.append("")
    return lines[:-1]


def _head(report: Report) -> Iterator[str]:
    step = "no step yet"
    if report.steps is not None:
        step = f"step {report.steps[1]}"
    yield f"{step} of {printable(report.title)}"
    values = _newest_values(report)
    if values:
        yield values
    yield from report.outcome.top
    yield from rank_lines(report.progress)


def _newest_values(report: Report) -> str:
    """Return the last losses and learning rates, in words."""
    words = [f"{loss.name} {loss.values[-1]:.4g}" for loss in report.tagged]
    rates = {f"{rate.values[-1]:.4g}" for rate in report.rates}
    if rates:
        words.append(f"learning rate {', '.join(sorted(rates))}")
    return printable(", ".join(words))


def _events(report: Report) -> Iterator[str]:
    kinds = by_kind(report.events)
    counts = ", ".join(f"{kind} {number:,}" for kind, number in kinds.items())
    yield f"events ({kinds.total():,}): {counts}".removesuffix(": ")
    edits = edits_of(report.rules)
    groups = sorted(event_groups(report.events), key=lambda group: -group.steps[1])
    for tripped in (True, False):
        shown = [group for group in groups if is_trip(group.first, edits) == tripped]
        for group in shown[:_EVENTS]:
            yield "  ".join(["", *islice(group.lines(), 2)])


def _remarks(report: Report) -> Iterator[str]:
    if report.remarks and report.is_partial:
        yield "in the newest records:"
    yield from report.outcome.callout_lines
