"""The norms of a series as one array, and the records of one tensor over several series. Needs numpy."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.spikes import Floats, Ints

# Stands for a norm that is missing; norms are never negative.
NO_NORM = -1.0


@dataclass(frozen=True)
class Sheet:
    """Norms of some tensors in the same steps, in an array of shape ``[tensors, columns]``.

    A column stands for one row, or for a few rows of a long run: then it has the largest norm, or NaN.
    """

    names: Sequence[str]
    steps: Ints  # of the first row of each column
    norms: Floats


def read_sheet(series: Part, repeated: Collection[int], every: int) -> Sheet:
    """Return the norms of a series without repeated columns; `every` rows share a column of the sheet."""
    all_names = series.key.names
    columns = [column for column in range(len(all_names)) if column not in repeated]
    # A damaged file may hold fewer rows than it says.
    all_steps = [np.empty(0, np.int64)]
    all_norms = [np.empty((len(columns), 0), np.float32)]
    for steps, values, present in blocks(series, every=every):
        norms = values
        if not present.all():
            norms = np.where(present, values, np.float32(NO_NORM))
        all_steps.append(steps[::every])
        missing = -len(norms) % every
        if missing:  # the last rows are too few for a column
            norms = np.pad(norms, ((0, missing), (0, 0)), constant_values=NO_NORM)
        # `reduceat` would take five times as long.
        highest = norms.reshape(-1, every, norms.shape[1]).max(axis=1)
        all_norms.append(highest[:, columns].T)
    names = [all_names[column] for column in columns]
    return Sheet(names, np.concatenate(all_steps), np.concatenate(all_norms, axis=1))


def records_of(places: Sequence[tuple[Sheet, int]], *, once: bool) -> tuple[Ints, Floats]:
    """Return steps and norms of one tensor, given the sheets and lines that hold it, in the order of steps.

    A tensor moves to a new series when another optimizer claims it. With `once`, a step has one record, and the later
    counts.
    """
    sheet, line = places[0]
    if len(places) == 1 and (np.diff(sheet.steps) > 0).all():
        return sheet.steps, sheet.norms[line]  # nearly always
    steps = np.concatenate([sheet.steps for sheet, _ in places])
    norms = np.concatenate([sheet.norms[line] for sheet, line in places])
    order = np.lexsort((norms != NO_NORM, steps))
    steps = steps[order]
    norms = norms[order]
    # A row without the tensor says nothing if another series, or another call, has it in the same step.
    if once:
        kept = np.diff(steps, append=np.iinfo(np.int64).max) > 0
    else:
        has_norm = norms != NO_NORM
        kept = has_norm | ~np.isin(steps, steps[has_norm])
    return steps[kept], norms[kept]
