"""The norms of a series as one array, and the records of one tensor over several series. Needs numpy."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.spikes import Floats, Ints

# Stands for a norm that is missing; norms are never negative.
NO_NORM = -1.0


# The steps and the norms of one tensor in one series.
Line = tuple[Ints, Floats]


def read_lines(series: Part, repeated: Collection[int], every: int) -> Iterator[tuple[str, Line]]:
    """Yield the norms of each tensor of a series, without repeated columns; all share the array of their steps.

    A norm stands for one row, or for `every` few rows of a long run: then it is the largest norm, or NaN.
    """
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
    shared = np.concatenate(all_steps)
    for column, norms in zip(columns, np.concatenate(all_norms, axis=1), strict=True):
        if (norms != NO_NORM).any():
            yield all_names[column], (shared, norms)


def records_of(lines: Sequence[Line], *, once: bool) -> Line:
    """Return steps and norms of one tensor over all its series, in the order of steps.

    A tensor moves to a new series when another optimizer claims it. With `once`, a step has one record, and the later
    counts.
    """
    if len(lines) == 1 and (np.diff(lines[0][0]) > 0).all():
        return lines[0]  # nearly always
    steps = np.concatenate([line_steps for line_steps, _ in lines])
    norms = np.concatenate([line_norms for _, line_norms in lines])
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
