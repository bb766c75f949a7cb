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
        names = [clean(key.names[column]) for column in columns]
        texts = list(dict.fromkeys(names))
        code_of = {name: code for code, name in enumerate(texts)}
        codes = np.array([code_of[name] for name in names], np.int32)
        for steps, values, present in blocks(series):
            rows, places = np.nonzero(present[:, wanted])
            only = np.zeros(len(rows), np.int32)
            yield {
                "step": steps[rows],
                "rank": np.full(len(rows), series.rank, np.int32),
                "rule": (only, [clean(key.rule)]),
                "point": (only, [clean(key.point)]),
                "stat": (only, [clean(key.stat)]),
                "name": (codes[places], texts),
                "value": values[rows, wanted[places]],
            }


def arrays(rows: Sequence[Stored], width: int) -> tuple[Any, Any, Any]:
    """Return steps, values (rows x columns, float32), and which of the values are present."""
    steps, floats, masks = zip(*rows, strict=True)
    step_array = np.array(steps, np.int64)
    values = np.frombuffer(b"".join(floats), np.float32).reshape(len(rows), width)
    if set(masks) == {None}:  # nearly always
        return step_array, values, np.ones(values.shape, bool)
    none_absent = bytes(absent_size(width))
    joined = b"".join(mask or none_absent for mask in masks)
    bits = np.frombuffer(joined, np.uint8).reshape(len(rows), -1)
    absent = np.unpackbits(bits, axis=1, count=width, bitorder="little")
    return step_array, values, absent == 0


def blocks(series: WholeSeries, start: int = 0, every: int = 1) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the `arrays` of successive rows; the number of rows of each but the last divides by `every`."""
    width = len(series.key.names)
    rows = series.stored(start)
    fitting = _BLOCK // max(1, width)
    count = max(1, fitting // every) * every
    block = list(islice(rows, count))
    while block:
        yield arrays(block, width)
        block = list(islice(rows, count))


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
