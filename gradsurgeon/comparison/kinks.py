"""Gradients that part because rounding moved a few elements over a kink, as of ReLU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradsurgeon.comparison.alignment import BOTH, Pairs
from gradsurgeon.errors import printable

# A few elements: no more than ten usual ones have together, or one that is ten times as large.
_ELEMENTS = 10.0
# In a small tensor a few elements are much of it: the gradient of a whole sample may be missing.
_SHARE = 0.1
# A fault of the code shows in each step: elsewhere a kink is so many times smaller.
_ONCE = 10.0
_TOLD = (
    "step {step}, {text}: the distance {far:.2g} is that of a few of {numel:,} elements at a kink, as of ReLU; "
    "it agrees in another step, and what comes after it was judged by {times:g} times as much"
)


def allow(pairs: Pairs, times: float) -> Iterator[str]:
    """Raise the limits of all that comes after a kink; yield a note for each kink.

    A kink is noise of its size, so all after it gets the limit of such noise. Later steps begin with other weights:
    their limits grow by the ratio by which the updates exceed theirs.

    Args:
        pairs: the tensors of two runs.
        times: how many times the noise is allowed.
    """
    cells = pairs.cells
    while len(apart := np.flatnonzero(pairs.apart)) and _is_kink(pairs, at := int(apart[0])):
        cell, after = cells[at].copy(), np.arange(len(cells)) >= at
        here = after & (cells["step"] == cell["step"])
        updates = pairs.ratio[here & pairs.of_base("value") & np.isfinite(cells["distance"])]
        grown = max(1.0, updates.max(initial=1.0))
        cells["limit"][here] = np.maximum(cells["limit"][here], times * cell["distance"])
        cells["limit"][after & ~here] *= grown
        text = printable(pairs.kind(at).text(pairs.name(at)))
        yield _TOLD.format(
            step=cell["step"],
            text=text,
            far=cell["distance"],
            numel=int(cell["numel"]),
            times=times,
        )


def _is_kink(pairs: Pairs, at: int) -> bool:
    """Tell whether an output gradient, the first tensor that parts, differs as by a kink.

    A kink switches elements on or off, so the norm changes by the square of the distance; a factor changes it more.
    """
    cells = pairs.cells
    cell, far = cells[at], cells["distance"][at]
    if pairs.kind(at).phase != "backward" or cell["state"] != BOTH or not np.isfinite(far):
        return False
    same = pairs.like(at, "kind", "name", "rank", "part", "call")
    again = (cells["distance"] > cells["limit"]) & (cells["distance"] > far / _ONCE)
    later = same & (cells["step"] > cell["step"])
    if (same & (cells["step"] < cell["step"])).any():
        # It agreed before. Later steps begin with other weights, so only what stays in all of several is a fault.
        is_fault = later.sum() > 1 and again[later].all()
    else:
        is_fault = not later.any() or again[later].any()
    most = min(_SHARE, _ELEMENTS / np.sqrt(cell["numel"]))
    is_small = far <= most and cell["shift"] <= far**2
    return bool(is_small and not is_fault)
