"""A small export of the norms of a run, for a repository to keep beside its rules. Needs numpy.

A run that does not fit keeps some rows of each block of steps: those at quantiles of the norm over all tensors, each with the
number of rows that it stands for. Counts from it are rounded.
"""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from gradsurgeon.errors import RecordError, printable, reason_of
from gradsurgeon.records.store.files import check_replaceable, replacing
from gradsurgeon.report.evidence.run_norms import RecordedTable, RunNorms

MOST_BYTES = 1_000_000
# Each kept row of a block stands for the rows up to this share of the block; the largest stands for itself.
_ENDS = (0.25, 0.5, 0.75, 0.9, 0.96, 0.99, 1.0)
_NO_EXPORT = "is no file that `gradsurgeon report RUN --norms FILE` has written"


@dataclass(frozen=True)
class _Export:
    norms: Literal[1]
    run: RunNorms


def write(run: RunNorms, path: Path) -> bool:
    """Write the norms of a run, at most 1 MB; return whether rows were left out.

    Raises:
        RecordError: another file would be written over, or the names of the model alone are too long.
    """
    check_replaceable(path, "export of norms", b'{"norms":')
    least = len(_content(run, 0.0))
    if least > MOST_BYTES:
        raise RecordError(
            f"{printable(run.name)}: the names of its model take more than an export may have: name the run directory instead"
        )
    share = 1.0
    content = _content(run, share)
    while len(content) > MOST_BYTES:
        share *= 0.9 * (MOST_BYTES - least) / (len(content) - least)
        content = _content(run, share)
    with replacing(path, binary=True) as file:
        file.write(content)
    return run.is_rounded or share < 1.0


def _content(run: RunNorms, share: float) -> bytes:
    if share < 1.0:
        tables = tuple(_thinned(table, share) for table in run.tables)
        run = replace(run, tables=tables, is_rounded=True)
    return TypeAdapter(_Export).dump_json(_Export(1, run)) + b"\n"


def _thinned(table: RecordedTable, share: float) -> RecordedTable:
    """Return some rows of each block of steps, at quantiles of the largest norm."""
    largest = np.abs(list(table.stats.values())).max(axis=0)
    known = np.where(table.present, np.nan_to_num(largest, nan=np.inf, posinf=np.inf), 0)
    size = known.max(axis=1, initial=0)
    weights = np.zeros_like(table.weights)
    blocks = max(1, int(len(size) * share / (len(_ENDS) + 1)))
    for block in np.array_split(np.arange(len(size)), blocks):
        ordered = block[np.argsort(size[block], kind="stable")]
        ends = np.rint(np.multiply(_ENDS, len(block) - 1)).astype(int)
        for group in np.split(ordered, ends):
            if len(group):
                weights[group[len(group) // 2]] = table.weights[group].sum()
    return replace(table, weights=weights).rows(weights > 0)


def read(path: Path) -> RunNorms:
    """Return the norms that `write` has written.

    Raises:
        RecordError: the file cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        run = TypeAdapter(_Export).validate_json(raw).run
    except OSError as error:
        raise RecordError(f"{printable(str(path))}: cannot be read: {reason_of(error)}") from None
    except (ValidationError, TypeError, EOFError, zlib.error):
        raise RecordError(
            f"{printable(str(path))}: {_NO_EXPORT}, or a part of it is gone"
        ) from None
    return replace(run, name=str(path))
