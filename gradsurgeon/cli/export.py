"""``gradsurgeon export``: the records of a run, one value per line. Never imports torch.

The export writes lines as it reads rows, so a run of any size fits into memory.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gradsurgeon._libraries import library
from gradsurgeon.cli.options import add_output, add_run, writing
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import Event
from gradsurgeon.store.files import check_replaceable, replacing, replacing_bytes
from gradsurgeon.store.json_text import digits, json_text, nonfinite_name
from gradsurgeon.store.run import open_run
from gradsurgeon.store.selection import COLUMNS, Chosen, Selection, nothing_fits

# A spreadsheet takes a cell that begins so for a formula, unless an apostrophe is before it.
_FORMULA, _TEXT = ("=", "+", "-", "@"), "'"
# An export begins with one of these; a file that begins otherwise is not overwritten.
_FIRST = (",".join(COLUMNS).encode(), b'{"type": "value"', b'{"type": "event"')

_EVENT = ("step", "rank", "rule", "kind", "name", "message")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl", "parquet"),
        required=True,
        help="csv has values only; jsonl also has events, and NaN and Infinity as texts; parquet has values "
        "only, with their types, and needs `-o` and pyarrow (pip install 'gradsurgeon[arrow]')",
    )
    add_output(parser)
    parser.add_argument("--stat", metavar="STAT", help="only this statistic, such as l2")
    parser.add_argument("--rule", metavar="RULE", help="only what this rule recorded")
    parser.add_argument("--name", metavar="PATTERN", help='only these tensors, such as "*.bias"')


def run(arguments: argparse.Namespace) -> int:
    output = arguments.output
    selection = Selection(arguments.name, arguments.stat, arguments.rule)
    with open_run(arguments.run) as opened, writing(output):
        chosen = selection.series(opened)
        events = selection.events(opened.events) if arguments.format == "jsonl" else []
        if not chosen and not events:
            raise nothing_fits(opened, opened.path)
        if arguments.format == "parquet":
            _parquet(output, chosen)
            return 0
        write = {"csv": _csv, "jsonl": _jsonl}[arguments.format]
        if output is None:
            write(sys.stdout, chosen, events)
            return 0
        check_replaceable(Path(output), _is_text_export, "export")
        with replacing(Path(output)) as out:
            write(out, chosen, events)
    return 0


def _parquet(output: str | None, chosen: Chosen) -> None:
    if output is None:
        raise RecordError(
            "`--format parquet` needs `-o FILE`: standard output is for text, and parquet is binary"
        )
    library("numpy", "arrow", "the format parquet")
    from gradsurgeon.store import tables  # noqa: PLC0415 # text is exported without numpy

    tables.parquet_library()  # before a file is begun
    check_replaceable(Path(output), tables.is_export, "export")
    with replacing_bytes(Path(output)) as file:
        tables.write_parquet(file, chosen)


def _is_text_export(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline(max(map(len, _FIRST)) + 1).startswith(_FIRST)


def _csv(out: IO[str], chosen: Chosen, events: Sequence[Event]) -> None:
    del events  # their columns differ
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for series, columns in chosen:
        key = series.key
        fixed = (str(series.rank), *map(_harmless, (key.rule, key.point, key.stat)))
        names = [(column, _harmless(key.names[column])) for column in columns]
        for row in series.rows():
            values, absent, step = row.values, row.absent, row.step
            writer.writerows(
                (step, *fixed, name, digits(values[column]))
                for column, name in names
                if column not in absent
            )


def _harmless(text: str) -> str:
    """Return a text without control characters that no spreadsheet takes for a formula.

    The form can be reversed: backslashes escape as in Python, so a backslash of the text is doubled, and
    a leading apostrophe is not part of the text.
    """
    shown = printable(text.replace("\\", "\\\\"))
    return f"{_TEXT}{shown}" if shown.startswith((*_FORMULA, _TEXT)) else shown


def _jsonl(out: IO[str], chosen: Chosen, events: Sequence[Event]) -> None:
    for series, columns in chosen:
        key = series.key
        fixed = {"rank": series.rank, "rule": key.rule, "point": key.point, "stat": key.stat}
        # This part is the same in all lines of a column.
        middle = json_text(fixed)[1:-1]
        tails = [(column, f', "name": {json_text(key.names[column])}') for column in columns]
        for row in series.rows():
            head = f'{{"type": "value", "step": {row.step}, {middle}'
            values, absent = row.values, row.absent
            out.writelines(
                f'{head}{tail}, "value": {_number(values[column])}}}\n'
                for column, tail in tails
                if column not in absent
            )
    for event in events:
        out.write(
            f"{json_text({'type': 'event', **{field: getattr(event, field) for field in _EVENT}})}\n"
        )


def _number(value: float) -> str:
    return digits(value) if math.isfinite(value) else f'"{nonfinite_name(value)}"'
