"""``gradsurgeon export``: the records of a run of any size, one value per line. Never imports torch."""

import argparse
import csv
import io
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gradsurgeon.cli.gone import refusal
from gradsurgeon.cli.options import add_output, add_run, writing
from gradsurgeon.common.events import Event
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.errors import printable
from gradsurgeon.records.store.files import check_replaceable, replacing
from gradsurgeon.records.store.layout import digits, is_present, json_text, nonfinite_name
from gradsurgeon.records.store.rank_file import COLUMNS, Chosen
from gradsurgeon.records.store.run import StoredRun, chosen, nothing_fits, open_run

# A spreadsheet takes a cell that begins so for a formula, unless an apostrophe is before it.
_FORMULA, _TEXT = ("=", "+", "-", "@"), "'"
# An export begins with one of these; a file that begins otherwise is not overwritten.
_FIRST = (",".join(COLUMNS).encode(), b'{"type": "value"', b'{"type": "event"')
_EVENT = ("step", "rank", "rule", "kind", "name", "message")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl"),
        type=_format,
        required=True,
        help="csv has values only; jsonl also has events, and NaN and Infinity as texts",
    )
    add_output(parser)
    parser.add_argument("--stat", metavar="STAT", help="only this statistic, such as l2")
    parser.add_argument("--rule", metavar="RULE", help="only what this rule recorded")
    parser.add_argument("--name", metavar="PATTERN", help='only these tensors, such as "*.bias"')


def _format(text: str) -> str:
    if text == "parquet":
        raise argparse.ArgumentTypeError(refusal("export --format parquet"))
    return text


def run(arguments: argparse.Namespace) -> int:
    output, form = arguments.output, arguments.format
    with open_run(arguments.run) as opened, writing(output):
        found = chosen(opened, arguments.name, arguments.stat, arguments.rule)
        events = _events(opened, arguments) if form == "jsonl" else []
        if not found and not events:
            raise nothing_fits(opened)
        lines = _csv(found) if form == "csv" else _jsonl(found, events)
        if output is None:
            sys.stdout.writelines(lines)
            return 0
        check_replaceable(Path(output), "export", *_FIRST)
        with replacing(Path(output)) as out:
            out.writelines(lines)
    return 0


def _events(opened: StoredRun, arguments: argparse.Namespace) -> list[Event]:
    """Return the events that fit by rule and name. An event has no statistic."""
    pattern = None if arguments.name is None else compile_pattern(arguments.name)
    return [
        event
        for event in opened.events
        if arguments.rule in (None, event.rule)
        and (pattern is None or (event.name and pattern.matches(event.name)))
    ]


def _csv(chosen: Chosen) -> Iterator[str]:
    yield f"{','.join(COLUMNS)}\n"
    for step, same, value in _values(chosen, _cells):
        yield f"{step},{same},{digits(value)}\n"


def _jsonl(chosen: Chosen, events: Sequence[Event]) -> Iterator[str]:
    for step, same, value in _values(chosen, lambda fields: json_text(fields)[1:-1]):
        number = digits(value) if math.isfinite(value) else f'"{nonfinite_name(value)}"'
        yield f'{{"type": "value", "step": {step}, {same}, "value": {number}}}\n'
    for event in events:
        fields = {field: getattr(event, field) for field in _EVENT}
        yield f"{json_text({'type': 'event', **fields})}\n"


def _values(
    chosen: Chosen, written: Callable[[Mapping[str, object]], str]
) -> Iterator[tuple[int, str, float]]:
    """Yield of each value: its step, the part of the line that is the same in all steps, and the value."""
    for series, columns in chosen:
        rule, stat, point, names = series.key
        fields = {"rank": series.rank, "rule": rule, "point": point, "stat": stat}
        same = [(column, written({**fields, "name": names[column]})) for column in columns]
        for step, stored, absent in series.stored():
            values = array("f", stored)
            for column, text in same:
                if is_present(absent, column):
                    yield step, text, values[column]


def _cells(fields: Mapping[str, object]) -> str:
    """Return cells without control characters that no spreadsheet takes for a formula, in a form that can be reversed."""
    shown = [printable(str(field).replace("\\", "\\\\")) for field in fields.values()]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        f"{_TEXT}{text}" if text.startswith((*_FORMULA, _TEXT)) else text for text in shown
    )
    return line.getvalue()
