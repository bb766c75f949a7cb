"""``gradsurgeon export``: the records of a run of any size, one value per line. Never imports torch."""

import argparse
import csv
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO

from gradsurgeon.cli.options import add_output, add_run, writing
from gradsurgeon.common.events import Event
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.errors import printable
from gradsurgeon.records.store.files import check_replaceable, replacing
from gradsurgeon.records.store.layout import digits, is_present, json_number, json_text
from gradsurgeon.records.store.rank_file import COLUMNS, Chosen
from gradsurgeon.records.store.run import StoredRun, chosen, nothing_fits, open_run

# A spreadsheet takes a cell that begins so for a formula, unless an apostrophe is before it.
_FORMULA = ("=", "+", "-", "@")
_TEXT = "'"
# An export begins with one of these; a file that begins otherwise is not overwritten.
_FIRST = (",".join(COLUMNS).encode(), b'{"type": "value"', b'{"type": "event"')


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl"),
        required=True,
        help="csv has values only; jsonl also has events, and NaN and Infinity as texts",
    )
    add_output(parser)
    parser.add_argument("--stat", metavar="STAT", help="only this statistic, such as l2")
    parser.add_argument("--rule", metavar="RULE", help="only what this rule recorded")
    parser.add_argument("--name", metavar="PATTERN", help='only these tensors, such as "*.bias"')


def run(arguments: argparse.Namespace) -> int:
    output = arguments.output
    form = arguments.format
    with open_run(arguments.run) as opened, writing(output):
        series = chosen(opened, arguments.name, arguments.stat, arguments.rule)
        events: list[Event] = []
        if form == "jsonl":
            events += _events(opened, arguments)
        if not series and not events:
            raise nothing_fits(opened)
        place: AbstractContextManager[IO[str]] = nullcontext(sys.stdout)
        if output is not None:
            check_replaceable(Path(output), "export", *_FIRST)
            place = replacing(Path(output))
        with place as out:
            if form == "csv":
                _write_csv(out, series)
            else:
                _write_jsonl(out, series, events)
    return 0


def _events(opened: StoredRun, arguments: argparse.Namespace) -> Iterator[Event]:
    """Yield the events that fit by rule and name. An event has no statistic."""
    pattern = None
    if arguments.name is not None:
        pattern = compile_pattern(arguments.name)
    for event in opened.events:
        if arguments.rule not in (None, event.rule):
            continue
        if pattern is None or (event.name and pattern.matches(event.name)):
            yield event


def _write_csv(out: IO[str], series: Chosen) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for step, rank, rule, point, stat, name, value in _rows(series):
        cells = (_cell(rule), _cell(point), _cell(stat), _cell(name))
        writer.writerow((step, rank, *cells, digits(value)))


def _write_jsonl(out: IO[str], series: Chosen, events: Sequence[Event]) -> None:
    for *fields, value in _rows(series):
        numbers = dict(zip(COLUMNS, (*fields, json_number(value)), strict=True))
        text = json_text({"type": "value", **numbers})
        out.write(f"{text}\n")
    for event in events:
        text = json_text({"type": "event", **asdict(event)})
        out.write(f"{text}\n")


def _rows(series: Chosen) -> Iterator[tuple[int, int, str, str, str, str, float]]:
    """Yield the fields of `COLUMNS` of each value."""
    for stored_series, columns in series:
        rule, stat, point, names = stored_series.key
        rank = stored_series.rank
        for step, stored, absent in stored_series.stored():
            values = array("f", stored)
            for column in columns:
                if is_present(absent, column):
                    yield step, rank, rule, point, stat, names[column], values[column]


@cache
def _cell(text: str) -> str:
    """Return a text without control characters that no spreadsheet takes for a formula, in a form that can be reversed."""
    shown = printable(text.replace("\\", "\\\\"))
    if shown.startswith((*_FORMULA, _TEXT)):
        return f"{_TEXT}{shown}"
    return shown
