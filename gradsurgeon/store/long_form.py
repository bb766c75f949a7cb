"""The records of a run in long form: one line per recorded value, as columns, a block of lines at a time.

Blocks are arrays of Python's own, which Arrow and numpy take without copying, so that neither of the two
needs the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from gradsurgeon.store.layout import clean
from gradsurgeon.store.selection import Chosen

COLUMNS = ("step", "rank", "rule", "point", "stat", "name", "value")
# Columns that hold texts. In a block each text is a number: its place in `LongForm.texts`.
TEXTS = ("rule", "point", "stat", "name")
# int64, int32 and float32, as `array` and `struct` name them.
_CODES = {"step": "q", "value": "f"}
_INT32 = "i"
Block = dict[str, "array[Any]"]  # by column


class LongForm:
    """Chosen series in long form.

    Attributes:
        texts: by column of texts, the texts that its numbers stand for.
    """

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._places: dict[str, dict[str, int]] = {column: {} for column in TEXTS}
        for series, columns in chosen:
            for name in columns:
                self._place("name", series.key.names[name])
            for column in ("rule", "point", "stat"):
                self._place(column, getattr(series.key, column))
        self.texts = {column: list(places) for column, places in self._places.items()}

    def _place(self, column: str, text: str) -> int:
        places = self._places[column]
        # Neither Arrow nor Parquet has lone surrogates, which odd file names make.
        return places.setdefault(clean(text), len(places))

    def blocks(self, size: float) -> Iterator[Block]:
        """Yield blocks of so many lines, and of those that the last step has beyond, in the order of the export."""
        block = empty()
        for series, columns in self._chosen:
            key = series.key
            names = array(_INT32, [self._place("name", key.names[column]) for column in columns])
            same = {"rank": series.rank}
            same |= {column: self._place(column, getattr(key, column)) for column in TEXTS[:-1]}
            whole = len(columns) == len(key.names)
            for step, values, absent in series.rows():
                if whole and not absent:
                    block["value"].extend(values)
                    block["name"].extend(names)
                else:
                    here = [place for place, column in enumerate(columns) if column not in absent]
                    block["value"].extend([values[columns[place]] for place in here])
                    block["name"].extend([names[place] for place in here])
                lines = len(block["value"])
                _pad(block, {"step": step}, lines)
                if lines >= size:
                    _pad(block, same, lines)
                    yield block
                    block = empty()
            _pad(block, same, len(block["value"]))
        if block["value"]:
            yield block


def empty() -> Block:
    return {column: array(_CODES.get(column, _INT32)) for column in COLUMNS}


def _pad(block: Block, same: dict[str, int], lines: int) -> None:
    """Fill columns up to a number of lines, each with one value."""
    for column, value in same.items():
        filled = block[column]
        filled.extend(array(filled.typecode, [value]) * (lines - len(filled)))
