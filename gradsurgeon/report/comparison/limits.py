"""Limits that depend on what came before: rounding goes on into later tensors, and so does a kink. Needs numpy.

A kink is where rounding decides which way a function goes on, as a ReLU.
"""

from collections.abc import Iterator

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.report.comparison.alignment import BOTH, Pairs
from gradsurgeon.report.comparison.tolerance import Tolerance

# A few elements: no more than ten usual ones have together, or one that is ten times as large.
_ELEMENTS = 10.0
# In a small tensor a few elements are much of it: the gradient of a whole sample may be missing.
_SHARE = 0.1
# A fault of the code shows in each step: elsewhere a kink is so many times smaller.
_ONCE = 10.0
# Of elements of a usual spread, a share as large as the distance lies at a kink. So what goes over one differs by the
# square root of what came before.
_SPREAD = 3.0


def raise_limits(pairs: Pairs, rule: Tolerance) -> list[str]:
    """Raise limits by what came before each tensor, and return notes on kinks."""
    kinks = list(_carry_on(pairs, rule.times, is_known=rule.kind != "rounding"))
    if not kinks:
        return []
    first = kinks[0]
    cell = pairs.cells[first]
    text = f"step {cell['step']}, {printable(pairs.text(first))}"
    if len(kinks) > 1:
        text += f" and {len(kinks) - 1} more"
    elements = int(cell["numel"])
    return [
        f"{text}: the distance {cell['distance']:.2g} is that of a few of {elements:,} elements at a kink, as of "
        f"ReLU; no other step repeats it, and what comes after it was judged by {rule.times:g} times as much"
    ]


def _carry_on(pairs: Pairs, times: float, *, is_known: bool) -> Iterator[int]:
    """Allow each tensor `times` the distance of what came before it; yield the kinks.

    Where noise runs make known how far rounding goes, they are enough until a kink. Later steps begin with the distance
    of the weights, and modules with that of their own. A weight goes by its gradients, of which an optimizer keeps means,
    and by itself before the update.
    """
    cells = pairs.cells
    step = int(cells["step"][0])
    largest = 0.0
    have_parted = False
    modules: dict[str, float] = {}
    params: dict[int, float] = {}
    for at, cell in enumerate(cells):
        phase = cell["phase"]
        name = int(cell["name"])
        if cell["step"] != step:
            largest, modules = _of_weights(pairs, step)
            step = int(cell["step"])
        before = largest
        if phase == "update":
            before = params.get(name, 0.0)
        elif phase == "forward":
            before = max(largest, modules.get(pairs.names[name], 0.0))
        if not is_known:
            cell["limit"] = max(cell["limit"], times * before)
        if cell["undecided"]:
            continue
        if cell["distance"] > cell["limit"]:
            if have_parted or not _is_kink(pairs, at):
                have_parted = True
                continue
            cell["limit"] = times * cell["distance"]
            is_known = False
            yield at
        distance = float(cell["distance"])
        if phase in ("gradient", "update"):
            params[name] = max(params.get(name, 0.0), distance)
        else:
            largest = max(largest, distance)


def _of_weights(pairs: Pairs, step: int) -> tuple[float, dict[str, float]]:
    """Return the distance of the weights after the update of a step: of all together, and the largest by module."""
    weights = pairs.cells[pairs.of_base("value") & (pairs.cells["step"] == step)]
    norms = np.nan_to_num(weights["norm"])
    distances = np.minimum(weights["distance"], 1.0)
    whole = np.sqrt((norms**2).sum())
    together = 0.0
    if whole:
        apart = distances * norms
        together = float(np.sqrt((apart**2).sum()) / whole)
    modules: dict[str, float] = {}
    for name, distance in zip(weights["name"].tolist(), distances.tolist(), strict=True):
        module = pairs.names[name].rpartition(".")[0]
        modules[module] = max(modules.get(module, 0.0), distance)
    return together, modules


def _is_kink(pairs: Pairs, at: int) -> bool:
    """Tell whether the first tensor that parts is an output gradient of which a few elements are switched on or off.

    That changes the norm by the square of the distance; a factor changes it more.
    """
    cell = pairs.cells[at]
    distance = cell["distance"]
    has_distance = cell["state"] == BOTH and np.isfinite(distance)
    if cell["phase"] != "backward" or not has_distance:
        return False
    most = min(_SHARE, _ELEMENTS / np.sqrt(cell["numel"]))
    is_switched = distance <= most and cell["shift"] <= distance**2
    return bool(is_switched) and not _is_repeated(pairs, at)


def _is_repeated(pairs: Pairs, at: int) -> bool:
    """Tell whether later steps have the difference again, or no other step is known.

    Later steps begin with other weights, which alone move elements over the kink.
    """
    cells = pairs.cells
    steps = cells["step"]
    distances = cells["distance"]
    same = pairs.like(at, "kind", "name", "rank", "part", "call")
    if same.sum() == 1:
        return True
    by_kink = distances[at] / _ONCE
    is_judged = ~cells["undecided"] & np.isfinite(distances)
    for later in np.flatnonzero(same & (steps > steps[at])).tolist():
        begin = int(np.searchsorted(steps, steps[later]))
        before = distances[begin:later][is_judged[begin:later]]
        by_spread = _SPREAD * np.sqrt(before.max(initial=0.0))
        if distances[later] > max(cells["limit"][later], by_kink, by_spread):
            return True
    return False
