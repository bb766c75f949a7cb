"""The calls of one module in one step, in both runs: how many there are, and in which order. Needs numpy."""

from typing import Any

import numpy as np

from gradsurgeon.report.comparison.reading import starts
from gradsurgeon.report.spikes import Flags

# Calls in another order are so many times nearer to each other in the right one.
_NEARER = 10.0


def other_numbers(cells: Any) -> Flags:
    """Tell which tensors have another number of rows in one of the runs that have them."""
    groups = np.cumsum(starts(cells)) - 1
    counts = np.array([np.bincount(groups, weights=found) for found in cells["found"].T])
    most = counts.max(axis=0)
    least = np.where(counts > 0, counts, np.inf).min(axis=0)
    return np.asarray((most > least)[groups])


def reorder_backward(cells: Any) -> None:
    """Give the calls of a module in backward passes of the run the order that they have in the reference.

    One backward pass of two losses comes to the last call first; two backward passes come to the first.
    """
    begins = np.flatnonzero(starts(cells))
    for calls in np.split(cells, begins[1:]):
        if len(calls) < 2 or calls["phase"][0] != "backward":  # noqa: PLR2004 # to reorder
            continue
        rows = calls["values"][:, :2, :3]
        if not np.isfinite(rows).all():
            continue
        ours = rows[:, None, 0]
        theirs = rows[None, :, 1]
        distances = np.abs(ours - theirs).max(axis=2)
        nearest = distances.argmin(axis=0)
        far_as_reordered = distances.min(axis=0).max()
        far_as_is = distances.diagonal().max()
        is_permutation = len(np.unique(nearest)) == len(nearest)
        if is_permutation and far_as_reordered * _NEARER < far_as_is:
            calls["values"][:, 0] = calls["values"][nearest, 0]
