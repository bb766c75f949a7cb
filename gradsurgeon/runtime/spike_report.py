"""The reports of `spike-trap`: which parameters carry a spike, and where in the backward pass it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradsurgeon.actions import Spikes
from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.runtime.running_norms import JudgedNorms
from gradsurgeon.runtime.trap_report import TrapReport

_SHOWN = 8
# Smaller factors do not count as growth.
_LEAST, _GROWN = 2.0, 1.5


def spike_report(
    names: Sequence[str], judged: JudgedNorms, arrived: Sequence[Sequence[int]]
) -> TrapReport:
    """Report the parameters that carry a spike, and where it begins. Waits for the device.

    Args:
        names: the names of all parameters.
        judged: norms, at least one of them a spike.
        arrived: all tensors in the order in which backward produced their gradients, empty if it is unknown. The tensors
            of one node share a group; -1 stands for a tensor that is no parameter of the model.
    """
    before, norms, passed = judged.before.cpu(), judged.norms.tolist(), judged.passed.tolist()
    if judged.spikes.over_rule:
        above = _above(judged.spikes, norms[0], before[:, 0])
        head = f"spike: over {count(len(judged.tensors), 'gradient')} {above}"
        title, (rows, more) = "each parameter's share of the squared norm:", _by_share(judged)
    else:
        spikes = [
            p for p, norm in enumerate(norms) if not (math.isfinite(norm) and passed[p] >= norm)
        ]
        spikes.sort(key=lambda place: -_excess(norms[place], passed[place]))
        bounds = "is above the bound" if len(spikes) == 1 else "are above the bounds"
        total = count(len(norms), "gradient")
        head = f"spike: {len(spikes)} of {total} {bounds} of {'its' if len(spikes) == 1 else 'their'} own past"
        title, shown = "the largest first:", spikes[:_SHOWN]
        rows = [(judged.tensors[p], _above(judged.spikes, norms[p], before[:, p])) for p in shown]
        more = [f"    ... {len(spikes) - _SHOWN} more"] if len(spikes) > _SHOWN else []
    labels = [printable(names[tensor]) for tensor, _ in rows]
    width = max(map(len, labels))
    table = [f"    {label:{width}}  {text}" for label, (_, text) in zip(labels, rows, strict=True)]
    begins = []
    if judged.spikes.over_rule or judged.spikes.bound.keeps_mean:
        begins = list(_beginning(names, judged, arrived))
    lines = [title, *table, *more, *begins]
    return TrapReport(names[rows[0][0]], head, lines, expect="", reduced=False)


def told_of_cut(names: Sequence[str], judged: JudgedNorms, numbers: Tensor) -> tuple[str, str]:
    """Return a line on gradients that `clip` has cut, and the parameter that was cut most or carries most of the norm."""
    norms, passed, before = judged.read(numbers)
    cut = [place for place, norm in enumerate(norms) if passed[place] < norm]
    place = max(cut, key=lambda place: _excess(norms[place], passed[place]))
    told = f"{_above(judged.spikes, norms[place], before[:, place])}: cut to {passed[place]:.3g}"
    if judged.spikes.over_rule:
        largest, carrier = judged.largest(numbers)
        name = names[judged.tensors[carrier]]
        share = f"{printable(name)} carries {(largest / norms[place]) ** 2:.0%} of its square"
        return f"over {count(len(judged.tensors), 'gradient')} {told}; {share}", name
    name = names[judged.tensors[place]]
    several = f" ({len(cut)} gradients were cut in this step)" if len(cut) > 1 else ""
    return f"of {printable(name)} {told}{several}", name


def _above(spikes: Spikes, norm: float, kept: Tensor) -> str:
    """Return the reason, in words, why a norm is a spike."""
    if not math.isfinite(norm):
        return f"the norm is {'NaN' if math.isnan(norm) else 'infinite'}"
    bound = spikes.bound.bounds(kept.tolist())
    above = "" if bound is None else f" is above {bound[0]:.3g} ({bound[1]})"
    return f"the norm {norm:.3g}{above}"


def _excess(norm: float, passed: float) -> float:
    return norm / passed if passed > 0 and math.isfinite(norm) else math.inf


def _by_share(judged: JudgedNorms) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the parameters that carry most of a norm, with a text, and a line on the others."""
    each = zip(judged.tensors, judged.each.tolist(), judged.usual.tolist(), strict=True)
    rows = sorted(each, key=lambda row: -math.inf if math.isnan(row[1]) else -row[1])
    total = sum(norm * norm for _, norm, _ in rows)
    known, shown = math.isfinite(total) and total > 0, []
    for tensor, norm, mean in rows[:_SHOWN]:
        share = f"{norm * norm / total:4.0%}  " if known else ""
        times = f", {norm / mean:.3g} times its running mean {mean:.3g}" if mean else ""
        shown.append((tensor, f"{share}norm {norm:.3g}{times if math.isfinite(norm) else ''}"))
    rest = sum(norm * norm for _, norm, _ in rows[_SHOWN:])
    share = f"  {rest / total:.0%}" if known else ""
    return shown, [f"    ... {len(rows) - _SHOWN} more{share}"] if len(rows) > _SHOWN else []


def _beginning(
    names: Sequence[str], judged: JudgedNorms, arrived: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Report where, in the order of backward, gradients begin to exceed their past; nothing if the order is unknown."""
    each = zip(judged.tensors, judged.each.tolist(), judged.usual.tolist(), strict=True)
    times = {t: norm / mean for t, norm, mean in each if mean and math.isfinite(norm)}
    order = [group for group in arrived if not times.keys().isdisjoint(group)]
    is_known = times.keys() <= {tensor for group in order for tensor in group}
    largest = max(times.values(), default=0.0)
    # If all come from one node, as in a fully compiled model, they have no order.
    if not is_known or len(order) < min(len(times), 2) or largest < _LEAST:
        return
    peaks = [max((times[tensor], tensor) for tensor in group if tensor in times) for group in order]
    # Half of the growth on a logarithmic scale.
    half = math.sqrt(largest)
    first = next(place for place, (grown, _) in enumerate(peaks) if grown >= half)
    grown, tensor = peaks[first]
    before = max((peak for peak, _ in peaks[:first]), default=0.0)
    # Nearly all of the growth in one place outweighs growth by the loss, or by chance, before it.
    if before and grown >= before * (_LEAST if before < _LEAST else half**1.5):
        yield (
            f"in the order of backward the spike begins at {_times(names, times, tensor)}; "
            f"{_times(names, times, peaks[first - 1][1])} right before it: look at this layer, and at the layers between "
            "the two"
        )
        return
    # An earlier gradient that the rule does not judge could be the origin.
    is_start = not first and order[0] is arrived[0] and times.keys() >= set(order[0])
    if is_start and min(times[one] for one in order[0]) >= _GROWN:
        yield (
            f"the first gradient of the backward pass is large already, {_times(names, times, tensor)}: the spike came "
            "with the loss, or from the operations between the loss and this layer: look at the batch of this step (a "
            "label, a length, an outlier)"
        )


def _times(names: Sequence[str], times: Mapping[int, float], tensor: int) -> str:
    return f"{printable(names[tensor])} ({times[tensor]:.3g} times its running mean)"
