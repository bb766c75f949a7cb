"""The records of a run in long form, one line per recorded value: for pandas. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsurgeon.records.store.layout import Stored, absent_size, clean
from gradsurgeon.records.store.memory import AnySeries, WholeSeries
from gradsurgeon.records.store.rank_file import COLUMNS, Chosen

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 2**18  # so many values are converted at a time
# Rank, rule, point and names of series of several statistics.
Group = tuple[int, str, str, tuple[str, ...]]
_TEXTS = ("rule", "point", "stat", "name")


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


def by_statistic(
    all_series: Iterable[AnySeries],
) -> dict[Group, dict[str, AnySeries]]:
    """Return by rank, rule, point and names the series of each statistic."""
    groups: dict[Group, dict[str, AnySeries]] = {}
    for series in all_series:
        rule, stat, point, names = series.key
        groups.setdefault((series.rank, rule, point, names), {})[stat] = series
    return groups


def together(parts: Mapping[str, WholeSeries], every: int = 1) -> tuple[Any, dict[str, Any], Any]:
    """Return steps, values by statistic, and which of them are present, of every so many rows that all series have."""
    # A run that is read while it is written may have a row more of one statistic.
    length = min(map(len, parts.values()))
    values = {}
    for stat, series in parts.items():
        rows = list(series.stored(0, length))[::every]
        steps, values[stat], present = arrays(rows, len(series.key.names))
    return steps, values, present


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
    """Return the chosen series in the order of `gradsurgeon export`."""
    pandas = import_module("pandas")
    frames = []
    for series, columns in chosen:
        wanted = np.array(columns)
        # Arrow, by which pandas writes Parquet, refuses lone surrogates, which odd file names contain.
        rule, stat, point, names = series.key
        texts = {"rule": clean(rule), "point": clean(point), "stat": clean(stat)}
        clean_names = np.array([clean(names[column]) for column in columns], object)
        for steps, values, present in blocks(series):
            rows, places = np.nonzero(present[:, wanted])
            numbers = values[rows, wanted[places]]
            frame = {"step": steps[rows], "name": clean_names[places], "value": numbers}
            frames.append(pandas.DataFrame({**frame, **texts, "rank": np.int32(series.rank)}))
    if not frames:
        raise chosen[0][0].damaged()
    table = pandas.concat(frames, ignore_index=True)[list(COLUMNS)]
    return table.astype(dict.fromkeys(_TEXTS, "category"))
