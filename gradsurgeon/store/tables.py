"""The records of a run as tables of pandas and Arrow. Both libraries are extras, imported when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradsurgeon._libraries import library
from gradsurgeon.store.long_form import COLUMNS, TEXTS, Block, LongForm, empty
from gradsurgeon.store.selection import Chosen

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# Lines of a record batch: 8 MB, and a row group of Parquet that is neither small nor large.
_BATCH = 2**18


def data_frame(chosen: Chosen) -> pd.DataFrame:
    pandas = library("pandas", "pandas", "to_pandas")
    numpy = import_module("numpy")  # pandas cannot be imported without it
    form = LongForm(chosen)
    block = next(form.blocks(math.inf), empty())
    columns = {
        column: numpy.frombuffer(block[column], block[column].typecode) for column in COLUMNS
    }
    for column in TEXTS:
        columns[column] = pandas.Categorical.from_codes(columns[column], form.texts[column])
    return pandas.DataFrame(columns)


def arrow_table(chosen: Chosen) -> pa.Table:
    arrow = library("pyarrow", "arrow", "to_arrow")
    return arrow.Table.from_batches(arrow_batches(chosen), arrow_schema())


def arrow_schema() -> pa.Schema:
    arrow = import_module("pyarrow")
    kinds = {"step": arrow.int64(), "rank": arrow.int32(), "value": arrow.float32()}
    text = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema([(column, kinds.get(column, text)) for column in COLUMNS])


def arrow_batches(chosen: Chosen) -> Iterator[pa.RecordBatch]:
    """Yield record batches as rows are read; all share the dictionaries of their texts."""
    arrow = import_module("pyarrow")
    form, schema = LongForm(chosen), arrow_schema()
    texts = {column: arrow.array(form.texts[column], arrow.string()) for column in TEXTS}
    for block in form.blocks(_BATCH):
        yield arrow.record_batch([_column(arrow, block, field, texts) for field in schema], schema)


def _column(arrow: Any, block: Block, field: Any, texts: dict[str, Any]) -> Any:
    """Return one column as an array of Arrow that shares the memory of the block."""
    is_text = field.name in texts
    kind = field.type.index_type if is_text else field.type
    memory = arrow.py_buffer(block[field.name])
    numbers = arrow.Array.from_buffers(kind, len(block[field.name]), [None, memory])
    if not is_text:
        return numbers
    return arrow.DictionaryArray.from_arrays(numbers, texts[field.name])
