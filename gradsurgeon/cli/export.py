"""``gradsurgeon export``: the records of a run, one value per line. Never imports torch.

Lines are written as rows are read, so that the size of a run does not matter.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from gradsurgeon._expressions import PatternError
from gradsurgeon.cli import fail
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import Event
from gradsurgeon.match import compile_pattern, select
from gradsurgeon.store.files import replacing
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run, open_run

COLUMNS = ("step", "rank", "rule", "point", "stat", "name", "value")
# What a spreadsheet takes for a formula, and the sign that says it is none.
_FORMULA, _TEXT = ("=", "+", "-", "@"), "'"
# What an export begins with: nothing else is written over.
_FIRST = (",".join(COLUMNS).encode(), b'{"type": "value"', b'{"type": "event"')
# JSON has no numbers for these; the spelling is that of Protocol Buffers.
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}

_EVENT = ("step", "rank", "rule", "kind", "name", "message")

Chosen = Sequence[tuple[StoredSeries, Sequence[int]]]


def run(arguments: argparse.Namespace) -> int:
    try:
        with open_run(arguments.run) as opened:
            chosen = list(_chosen(opened, arguments))
            events = list(_events(opened, arguments)) if arguments.format == "jsonl" else []
            if not chosen and not events:
                return fail(_why_nothing(opened))
            if arguments.output is None:
                _FORMATS[arguments.format](sys.stdout, chosen, events)
                return 0
            if reason := _why_kept(Path(arguments.output)):
                return fail(f"{printable(arguments.output)}: {reason}")
            with replacing(Path(arguments.output)) as out:
                _FORMATS[arguments.format](out, chosen, events)
    except BrokenPipeError:
        raise  # the reader has seen enough: no error
    except (RecordError, PatternError) as error:
        return fail(str(error))
    except OSError as error:
        where = printable(arguments.output or "standard output")
        return fail(f"cannot write {where}: {error.strerror or error}")
    return 0


def _chosen(run: Run, arguments: argparse.Namespace) -> Iterator[tuple[StoredSeries, list[int]]]:
    pattern = None if arguments.name is None else compile_pattern(arguments.name)
    for series in run:
        key = series.key
        if arguments.rule in (None, key.rule) and arguments.stat in (None, key.stat):
            columns = range(len(key.names)) if pattern is None else select([pattern], key.names)
            if columns := list(columns):
                yield series, columns


def _events(run: Run, arguments: argparse.Namespace) -> Iterator[Event]:
    pattern = None if arguments.name is None else compile_pattern(arguments.name)
    for event in run.events:
        named = pattern is None or (event.name and select([pattern], [event.name]))
        if arguments.rule in (None, event.rule) and named:
            yield event


def _why_nothing(run: Run) -> str:
    keys = [series.key for series in run]
    if not keys:
        return f"{printable(str(run.path))}: nothing was recorded"
    stats = ", ".join(sorted({printable(key.stat) for key in keys}))
    rules = ", ".join(sorted({printable(key.rule) for key in keys}))
    example = printable(keys[0].names[0]) if keys[0].names else "none"
    return (
        f"nothing recorded fits `--rule`, `--stat` and `--name`; rules: {rules}; statistics: {stats}; "
        f"names such as {example}"
    )


def _why_kept(path: Path) -> str:
    """Return why the file there must not be written over; empty where there is none, or it may be."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        first = file.readline(max(map(len, _FIRST)) + 1)
    if first and not first.startswith(_FIRST):
        return "is there already and is no export; name another one, or remove it first"
    return ""


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
                (step, *fixed, name, f"{values[column]:.9g}")
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
        middle = _json(fixed)[1:-1]
        tails = [(column, f', "name": {_json(key.names[column])}') for column in columns]
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
            f"{_json({'type': 'event', **{field: getattr(event, field) for field in _EVENT}})}\n"
        )


def _json(value: object) -> str:
    # The one control character of ASCII that JSON lets through.
    return json.dumps(value).replace("\x7f", "\\u007f")


def _number(value: float) -> str:
    # Nine digits tell every float32 from the next.
    return f"{value:.9g}" if math.isfinite(value) else f'"{_NAMES.get(value, "NaN")}"'


_FORMATS: dict[str, Callable[[IO[str], Chosen, Sequence[Event]], None]] = {
    "csv": _csv,
    "jsonl": _jsonl,
}
