"""The records of a run in long form, one line per recorded value: for pandas. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsurgeon.records.store.layout import Stored, absent_size, clean
from gradsurgeon.records.store.memory import WholeSeries
from gradsurgeon.records.store.rank_file import COLUMNS, Chosen

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 2**18  # so many values are converted at a time
_TEXTS = ("rule", "point", "stat", "name")


def _blocks(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Yield the chosen series as blocks of columns, in the order of `gradsurgeon export`; texts as codes and texts."""
    for series, columns in chosen:
        key = series.key
        wanted = np.array(columns)
        # Arrow, by which pandas writes Parquet, refuses lone surrogates, which odd file names contain.
        names = [clean(key.names[number]) for number in columns]
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        codes = np.array([places[name] for name in names], np.int32)
        for steps, values, present in blocks(series):
            lines, found = np.nonzero(present[:, wanted])
            rank, same = (np.full(len(lines), value, np.int32) for value in (series.rank, 0))
            yield {
                "step": steps[lines],
                "rank": rank,
                "rule": (same, [clean(key.rule)]),
                "point": (same, [clean(key.point)]),
                "stat": (same, [clean(key.stat)]),
                "name": (codes[found], list(places)),
                "value": values[lines, wanted[found]],
            }


def arrays(rows: Sequence[Stored], width: int) -> tuple[Any, Any, Any]:
    """Return steps, values (rows x columns, float32), and which of the values are present."""
    steps, floats, masks = zip(*rows, strict=True)
    values = np.frombuffer(b"".join(floats), np.float32).reshape(len(rows), width)
    if {*masks} == {None}:  # nearly always
        return np.array(steps, np.int64), values, np.ones(values.shape, bool)
    none = bytes(absent_size(width))
    bits = np.frombuffer(b"".join(mask or none for mask in masks), np.uint8)
    absent = np.unpackbits(bits.reshape(len(rows), -1), axis=1, count=width, bitorder="little")
    return np.array(steps, np.int64), values, absent == 0


def blocks(series: WholeSeries, start: int = 0, every: int = 1) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the `arrays` of successive rows; the number of rows of each but the last divides by `every`."""
    width = len(series.key.names)
    rows = series.stored(start)
    most = max(1, _BLOCK // max(1, width) // every) * every
    while block := list(islice(rows, most)):
        yield arrays(block, width)


def data_frame(chosen: Chosen) -> pd.DataFrame:
    pandas = import_module("pandas")
    blocks = list(_blocks(chosen))
    if not blocks:
        raise chosen[0][0].damaged()
    columns: dict[str, Any] = {}
    for column in COLUMNS:
        parts = [block[column] for block in blocks]
        if column in _TEXTS:
            texts = [pandas.Categorical.from_codes(*part) for part in parts]
            columns[column] = pandas.api.types.union_categoricals(texts)
        else:
            columns[column] = np.concatenate(parts)
    return pandas.DataFrame(columns)
