"""``gradsurgeon export``: the records of a run, one value per line. Never imports torch.

Lines are written as rows are read, so that the size of a run does not matter.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from gradsurgeon._expressions import PatternError
from gradsurgeon._libraries import library
from gradsurgeon.cli import fail
from gradsurgeon.errors import GradSurgeonError, RecordError, printable
from gradsurgeon.events import Event
from gradsurgeon.store.files import check_replaceable, replacing, replacing_bytes
from gradsurgeon.store.json_text import digits, json_text, nonfinite_name
from gradsurgeon.store.run import Run, open_run
from gradsurgeon.store.selection import COLUMNS, Chosen, Selection, nothing_fits

# What a spreadsheet takes for a formula, and the sign that says it is none.
_FORMULA, _TEXT = ("=", "+", "-", "@"), "'"
# What an export begins with: nothing else is written over.
_FIRST = (",".join(COLUMNS).encode(), b'{"type": "value"', b'{"type": "event"')

_EVENT = ("step", "rank", "rule", "kind", "name", "message")


def run(arguments: argparse.Namespace) -> int:
    try:
        with open_run(arguments.run) as opened:
            _export(opened, arguments)
    except BrokenPipeError:
        raise  # the reader has seen enough: no error
    except (GradSurgeonError, PatternError) as error:
        return fail(str(error))
    except OSError as error:
        where = printable(arguments.output or "standard output")
        return fail(f"cannot write {where}: {error.strerror or error}")
    return 0


def _export(opened: Run, arguments: argparse.Namespace) -> None:
    selection = Selection(arguments.name, arguments.stat, arguments.rule)
    chosen = selection.series(opened)
    events = selection.events(opened.events) if arguments.format == "jsonl" else []
    if not chosen and not events:
        raise nothing_fits(opened, opened.path)
    if arguments.format == "parquet":
        _parquet(arguments.output, chosen)
    elif arguments.output is None:
        _FORMATS[arguments.format](sys.stdout, chosen, events)
    else:
        path = Path(arguments.output)
        check_replaceable(path, _is_text_export, "export")
        with replacing(path) as out:
            _FORMATS[arguments.format](out, chosen, events)


def _parquet(output: str | None, chosen: Chosen) -> None:
    if output is None:
        raise RecordError(
            "`--format parquet` needs `-o FILE`: parquet is no text for standard output"
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
    del events  # they have other columns
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
    """Return a text that a terminal shows as it is and that no spreadsheet takes for a formula.

    The text can be had back: a backslash begins an escape as in Python, so that each of its own is
    doubled, and where the first character is an apostrophe, it is not part of the text.
    """
    shown = printable(text.replace("\\", "\\\\"))
    return f"{_TEXT}{shown}" if shown.startswith((*_FORMULA, _TEXT)) else shown


def _jsonl(out: IO[str], chosen: Chosen, events: Sequence[Event]) -> None:
    for series, columns in chosen:
        key = series.key
        fixed = {"rank": series.rank, "rule": key.rule, "point": key.point, "stat": key.stat}
        # The same text in every line of a column: made once.
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


_FORMATS: dict[str, Callable[[IO[str], Chosen, Sequence[Event]], None]] = {
    "csv": _csv,
    "jsonl": _jsonl,
}
