"""Limits that depend on what came before: rounding goes on into later tensors, and so does a kink. Needs numpy.

A kink is where rounding decides which way a function goes on: a ReLU, or an optimizer that steps by a gradient's sign.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.report.comparison.alignment import BOTH, Pairs
from gradsurgeon.report.comparison.tolerance import DECIDED_BY_ROUNDING, Tolerance

# A few elements: no more than ten usual ones have together, or one that is ten times as large.
_ELEMENTS = 10.0
# In a small tensor a few elements are much of it: the gradient of a whole sample may be missing.
_SHARE = 0.1
# A fault of the code shows in each step: elsewhere a kink is so many times smaller.
_ONCE = 10.0
# Of elements of a usual spread, a share as large as the distance lies at a kink. So what goes over one differs by the
# square root of what came before.
_SPREAD = 3.0
# The elements that an optimizer steps the other way: some, and so many times the share that rounding moves over zero.
_FLIPPED, _FLIPS = 4.0, 10.0
# Weights that differ by the optimizer are a group, and more than one of so many.
_GROUP = 6.0


def settle(pairs: Pairs, rule: Tolerance) -> list[str]:
    """Raise limits by what came before each tensor, and return notes on kinks."""
    kinks = list(_carry_on(pairs, rule.times, is_known=rule.kind != "rounding"))
    return [*_notes(pairs, kinks, rule.times)]


def _carry_on(pairs: Pairs, times: float, *, is_known: bool) -> Iterator[int]:
    """Allow each tensor `times` the distance of what came before it; yield the kinks.

    Where noise runs make known how far rounding goes, they are enough until a kink. Later steps begin with the distance
    of the weights, and modules with that of their own. A weight goes by its gradients, of which an optimizer keeps means,
    and by itself before the update.
    """
    cells = pairs.cells
    phases = [kind.phase for kind in pairs.kinds]
    step = int(cells["step"][0])
    largest = 0.0
    have_parted = False
    modules: dict[str, float] = {}
    params: dict[int, float] = {}
    for at, cell in enumerate(cells):
        phase, name = phases[cell["kind"]], int(cell["name"])
        if cell["step"] != step:
            largest, modules = _of_weights(pairs, step)
            step = int(cell["step"])
        before = largest
        if phase == "update":
            before = params.get(name, 0.0)
            cell["undecided"] |= (
                not is_known and _turned(cell, _FLIPS * before) > DECIDED_BY_ROUNDING
            )
        elif phase == "forward":
            before = max(largest, modules.get(pairs.names[name], 0.0))
        if not is_known:
            cell["limit"] = max(cell["limit"], times * before)
        if cell["undecided"]:
            continue
        if cell["distance"] > cell["limit"]:
            have_parted = have_parted or not _is_kink(pairs, at)
            if have_parted:
                continue
            cell["limit"] = times * cell["distance"]
            is_known = is_known and phase == "update"
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
    together = float(np.sqrt(((distances * norms) ** 2).sum()) / whole) if whole else 0.0
    modules: dict[str, float] = {}
    for name, distance in zip(weights["name"].tolist(), distances.tolist(), strict=True):
        module = pairs.names[name].rpartition(".")[0]
        modules[module] = max(modules.get(module, 0.0), distance)
    return together, modules


def _is_kink(pairs: Pairs, at: int) -> bool:
    """Tell whether the first tensor that parts differs in a few elements, as by a kink."""
    cell = pairs.cells[at]
    phase = pairs.kind(at).phase
    if cell["state"] != BOTH or not np.isfinite(cell["distance"]):
        return False
    if phase == "backward":
        return _is_switched(pairs, at) and not _is_repeated(pairs, at)
    return phase == "update" and _is_stepped_back(pairs, at)


def _is_switched(pairs: Pairs, at: int) -> bool:
    """Tell whether a few elements of an output gradient are switched on or off.

    That changes the norm by the square of the distance; a factor changes it more.
    """
    cell = pairs.cells[at]
    most = min(_SHARE, _ELEMENTS / np.sqrt(cell["numel"]))
    return bool(cell["distance"] <= most and cell["shift"] <= cell["distance"] ** 2)


def _is_repeated(pairs: Pairs, at: int) -> bool:
    """Tell whether later steps have the difference again, or no other step is known.

    Later steps begin with other weights, which alone move elements over the kink.
    """
    cells = pairs.cells
    same = pairs.like(at, "kind", "name", "rank", "part", "call")
    if same.sum() == 1:
        return True
    for later in np.flatnonzero(same & (cells["step"] > cells["step"][at])).tolist():
        far = cells["distance"][later]
        begun = int(np.searchsorted(cells["step"], cells["step"][later]))
        before = cells[begun:later]
        came = before["distance"][~before["undecided"] & np.isfinite(before["distance"])]
        usual = max(
            cells["limit"][later],
            cells["distance"][at] / _ONCE,
            _SPREAD * np.sqrt(came.max(initial=0.0)),
        )
        if far > usual:
            return True
    return False


def _turned(cell: Any, share: float) -> float:
    """Return the distance of a weight if an optimizer makes a full step of a share of its elements the other way."""
    return float(2.0 * np.sqrt(share) * cell["moved"])


def _is_stepped_back(pairs: Pairs, at: int) -> bool:
    """Tell whether an optimizer such as Adam made a full step of a few elements the other way.

    Rounding decides the sign of their gradient. Another learning rate or weight decay moves most weights, or a weight
    along itself, which changes its norm.
    """
    cells, cell = pairs.cells, pairs.cells[at]
    weights = pairs.of_base("value") & pairs.like(at, "step")
    gradient = pairs.of_base("grad") & pairs.like(at, "step", "name")
    turned = cells["distance"][gradient & np.isfinite(cells["distance"])].max(initial=0.0)
    most = _turned(cell, _FLIPPED / cell["numel"] + _FLIPS * turned)
    is_lone = (pairs.apart & weights).sum() <= max(1.0, weights.sum() / _GROUP)
    return bool(is_lone and cell["distance"] <= most and 2 * cell["shift"] <= cell["distance"])


def _notes(pairs: Pairs, kinks: Sequence[int], times: float) -> Iterator[str]:
    updates = [at for at in kinks if pairs.kind(at).phase == "update"]
    modules = [at for at in kinks if at not in updates]
    if modules:
        cell = pairs.cells[modules[0]]
        yield (
            f"{_told(pairs, modules)}: the distance {cell['distance']:.2g} is that of a few of {int(cell['numel']):,} "
            f"elements at a kink, as of ReLU; no other step repeats it, and what comes after it was judged by {times:g} "
            "times as much"
        )
    if updates:
        yield (
            f"{_told(pairs, updates)}: the distance is that of a few elements whose gradient is close to zero, of which "
            "an optimizer such as Adam makes a full step either way"
        )


def _told(pairs: Pairs, kinks: Sequence[int]) -> str:
    first = kinks[0]
    text = (
        f"step {pairs.cells['step'][first]}, {printable(pairs.kind(first).text(pairs.name(first)))}"
    )
    return f"{text} and {len(kinks) - 1} more" if len(kinks) > 1 else text
