"""The records of a run in long form, one line per recorded value: for pandas, Arrow and Parquet. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gradsurgeon._libraries import library
from gradsurgeon.store.layout import Stored, absent_size, clean
from gradsurgeon.store.rank_file import COLUMNS, Chosen

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_TEXTS = ("rule", "point", "stat", "name")
# In a block each text is a number: its place among all texts of its column.
_DTYPES = dict.fromkeys(COLUMNS, np.int32) | {"step": np.int64, "value": np.float32}
Block = Mapping[str, "np.ndarray[Any, Any]"]  # by column


def _places(chosen: Chosen) -> dict[str, dict[str, int]]:
    """Return, for each column of texts, the number that stands for each text."""
    places: dict[str, dict[str, int]] = {column: {} for column in _TEXTS}
    for series, columns in chosen:
        rule, stat, point, names = series.key
        texts = [("rule", rule), ("point", point), ("stat", stat)]
        for column, text in (*texts, *(("name", names[number]) for number in columns)):
            # Arrow and Parquet refuse lone surrogates, which odd file names contain.
            places[column].setdefault(clean(text), len(places[column]))
    return places


def _blocks(chosen: Chosen, places: Mapping[str, Mapping[str, int]]) -> Iterator[Block]:
    """Yield the chosen series as blocks of columns, in the order of `gradsurgeon export`."""
    for series, columns in chosen:
        key, wanted = series.key, np.array(columns)
        names = np.array([places["name"][clean(key.names[n])] for n in columns], np.int32)
        fixed = {
            text: places[text][clean(getattr(key, text))] for text in ("rule", "point", "stat")
        }
        for rows in series.batches():
            steps, values, present = arrays(rows, len(key.names))
            lines, found = np.nonzero(present[:, wanted])
            same = {"rank": series.rank, **fixed}.items()
            yield {
                "step": steps[lines],
                **{column: np.full(len(lines), value, np.int32) for column, value in same},
                "name": names[found],
                "value": values[lines, wanted[found]],
            }


def arrays(rows: Sequence[Stored], width: int) -> tuple[Any, Any, Any]:
    """Return steps, values (rows x columns, float32), and which of the values are present."""
    values = np.frombuffer(b"".join(row[1] for row in rows), np.float32)
    none = bytes(absent_size(width))
    bits = np.frombuffer(b"".join(row[2] or none for row in rows), np.uint8)
    absent = np.unpackbits(bits.reshape(len(rows), -1), axis=1, count=width, bitorder="little")
    steps = np.array([row[0] for row in rows], np.int64)
    return steps, values.reshape(len(rows), width), absent == 0


def _joined(blocks: Sequence[Block]) -> dict[str, Any]:
    return {
        column: np.concatenate([np.empty(0, dtype), *(block[column] for block in blocks)])
        for column, dtype in _DTYPES.items()
    }


def data_frame(chosen: Chosen) -> pd.DataFrame:
    pandas = import_module("pandas")
    places = _places(chosen)
    columns = _joined(list(_blocks(chosen, places)))
    for column, texts in places.items():
        columns[column] = pandas.Categorical.from_codes(columns[column], list(texts))
    return pandas.DataFrame(columns)


def _arrow_schema() -> pa.Schema:
    arrow = import_module("pyarrow")
    kinds = {"step": arrow.int64(), "rank": arrow.int32(), "value": arrow.float32()}
    text = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema([(column, kinds.get(column, text)) for column in COLUMNS])


def _arrow_batches(chosen: Chosen) -> Iterator[pa.RecordBatch]:
    """Yield record batches as rows are read. All batches share the dictionaries of their texts."""
    arrow = import_module("pyarrow")
    places, schema = _places(chosen), _arrow_schema()
    texts = {column: arrow.array(list(of), arrow.string()) for column, of in places.items()}

    for block in _blocks(chosen, places):
        columns = {column: arrow.array(values) for column, values in block.items()}
        for column, dictionary in texts.items():
            columns[column] = arrow.DictionaryArray.from_arrays(columns[column], dictionary)
        yield arrow.record_batch([columns[column] for column in COLUMNS], schema)


def parquet_library() -> Any:
    """Return `pyarrow.parquet`; raise `GradSurgeonError` if it is missing."""
    return library("pyarrow.parquet", "arrow", "the format parquet")


def write_parquet(file: IO[bytes], chosen: Chosen) -> None:
    with parquet_library().ParquetWriter(file, _arrow_schema()) as writer:
        for batch in _arrow_batches(chosen):
            writer.write_batch(batch)


def is_export(path: Path) -> bool:
    """Return whether a file has the columns of an export: only such a file may be written over."""
    try:
        found = parquet_library().read_schema(path)
    except (OSError, ValueError):  # no Parquet, cut off, or damaged
        return False
    return bool(found.equals(_arrow_schema()))
