"""The records of a run as a file of Parquet, written as rows are read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import IO, Any

from gradsurgeon._libraries import library
from gradsurgeon.store.selection import Chosen
from gradsurgeon.store.tables import arrow_batches, arrow_schema

# In the schema of a file, says that it is an export and may be written over by another one.
_MARK = {"gradsurgeon.export": "1"}
_MAGIC = b"PAR1"


def parquet_library() -> Any:
    """Return `pyarrow.parquet`; raise `GradSurgeonError` where it is missing."""
    return library("pyarrow.parquet", "arrow", "the format parquet")


def write_parquet(file: IO[bytes], chosen: Chosen) -> None:
    parquet = parquet_library()
    with parquet.ParquetWriter(file, arrow_schema().with_metadata(_MARK)) as writer:
        for batch in arrow_batches(chosen):
            writer.write_batch(batch)


def is_export(path: Path) -> bool:
    """Return whether a file has the mark and the columns of an export, and no more: pandas adds its own."""
    parquet = parquet_library()
    arrow = import_module("pyarrow")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return False
        try:
            found = parquet.read_schema(file)
        except (OSError, arrow.ArrowException):  # cut off, or damaged
            return False
    marked = arrow_schema().with_metadata(_MARK)
    return bool(found.equals(marked, check_metadata=True))
