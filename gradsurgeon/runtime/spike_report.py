"""The report of a spike: which parameters carry it, and where in the order of backward it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradsurgeon.actions import Spikes
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count, grid
from gradsurgeon.runtime.running_norms import JudgedNorms
from gradsurgeon.runtime.trap_report import GOES_ON, TrapReport

_SPIKES_SHOWN = 8
# Smaller factors do not count as growth.
_LEAST, _GROWN = 2.0, 1.5


def spike_report(
    names: Sequence[str], judged: JudgedNorms, arrived: Sequence[Sequence[int]]
) -> TrapReport:
    """Report the parameters that carry a spike, and where it begins. Waits for the device.

    ``arrived`` has the order of backward, empty if it is unknown: tensors of one node share a group, -1 is no parameter.
    """
    before, norms, passed = judged.before.cpu(), judged.norms.tolist(), judged.passed.tolist()
    total, spikes = count(len(judged.indices), "gradient"), judged.spikes
    if spikes.over_rule:
        head = f"spike: over {total} {_above(spikes, norms[0], before[:, 0])}"
        title, rows = "each parameter's share of the squared norm:", _by_share(judged)
    else:
        places = [p for p, norm in enumerate(norms) if not passed[p] >= norm or norm == math.inf]
        places.sort(key=lambda place: -_excess(norms[place], passed[place]))
        head = f"spike: {len(places)} of {total} above the bound of its own past"
        title = "the largest first:"
        rows = [(judged.indices[p], _above(spikes, norms[p], before[:, p])) for p in places]
    shown = [(printable(names[index]), text) for index, text in rows[:_SPIKES_SHOWN]]
    lines = [title, *grid(shown)]
    if len(rows) > _SPIKES_SHOWN:
        lines.append(f"    ... {len(rows) - _SPIKES_SHOWN} more")
    if spikes.over_rule or spikes.bound.keeps_mean:
        lines += _beginning(names, judged, arrived)
    return TrapReport(names[rows[0][0]], head, lines, goes_on=GOES_ON, reduced=False)


def told_of_cut(names: Sequence[str], judged: JudgedNorms, numbers: Tensor) -> tuple[str, str]:
    """Return a line on the norm that `clip` has cut most, and its parameter; no name for a norm over all."""
    norms, passed, before = judged.read(numbers)
    cut = [place for place, norm in enumerate(norms) if passed[place] < norm]
    place = max(cut, key=lambda place: _excess(norms[place], passed[place]))
    told = f"{_above(judged.spikes, norms[place], before[:, place])}: cut to {passed[place]:.3g}"
    if judged.spikes.over_rule:
        return f"over {count(len(judged.indices), 'gradient')} {told}", ""
    name = names[judged.indices[place]]
    return f"of {printable(name)} {told}", name


def _above(spikes: Spikes, norm: float, kept: Tensor) -> str:
    """Return the reason, in words, why a norm is a spike."""
    if not math.isfinite(norm):
        return f"the norm is {'NaN' if math.isnan(norm) else 'infinite'}"
    bound = spikes.bound.bounds(kept.tolist())
    above = "" if bound is None else f" is above {bound[0]:.3g} ({bound[1]})"
    return f"the norm {norm:.3g}{above}"


def _excess(norm: float, passed: float) -> float:
    return norm / passed if passed > 0 and math.isfinite(norm) else math.inf


def _by_share(judged: JudgedNorms) -> list[tuple[int, str]]:
    """Return the parameters that carry a norm, the largest first, with a text."""
    each = zip(judged.indices, judged.each.tolist(), judged.usual.tolist(), strict=True)
    rows = sorted(each, key=lambda row: -math.inf if math.isnan(row[1]) else -row[1])
    total, found = sum(norm * norm for _, norm, _ in rows), []
    known = math.isfinite(total) and total > 0
    for index, norm, mean in rows:
        share = f"{norm * norm / total:4.0%}  " if known else ""
        times = f", {norm / mean:.3g} times its running mean {mean:.3g}" if mean else ""
        found.append((index, f"{share}norm {norm:.3g}{times if math.isfinite(norm) else ''}"))
    return found


def _beginning(
    names: Sequence[str], judged: JudgedNorms, arrived: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Report where, in the order of backward, gradients begin to exceed their past; nothing if the order is unknown."""
    each = zip(judged.indices, judged.each.tolist(), judged.usual.tolist(), strict=True)
    times = {t: norm / mean for t, norm, mean in each if mean and math.isfinite(norm)}
    order = [group for group in arrived if not times.keys().isdisjoint(group)]
    is_known = times.keys() <= {index for group in order for index in group}
    largest = max(times.values(), default=0.0)
    # If all come from one node, as in a fully compiled model, they have no order.
    if not is_known or len(order) < min(len(times), 2) or largest < _LEAST:
        return
    peaks = [max((times[index], index) for index in group if index in times) for group in order]
    # Half of the growth on a logarithmic scale.
    half = math.sqrt(largest)
    first = next(place for place, (grown, _) in enumerate(peaks) if grown >= half)
    grown, index = peaks[first]
    before = max((peak for peak, _ in peaks[:first]), default=0.0)
    # Nearly all of the growth in one place outweighs growth by the loss, or by chance, before it.
    if before and grown >= before * (_LEAST if before < _LEAST else half**1.5):
        yield (
            f"in the order of backward the spike begins at {_times(names, times, index)}; "
            f"{_times(names, times, peaks[first - 1][1])} right before it: look at this layer, and at the layers between "
            "the two"
        )
        return
    # An earlier gradient that the rule does not judge could be the origin.
    is_start = not first and order[0] is arrived[0] and times.keys() >= set(order[0])
    if is_start and min(times[one] for one in order[0]) >= _GROWN:
        yield (
            f"the first gradient of the backward pass is large already, {_times(names, times, index)}: the spike came "
            "with the loss, or from the operations between the loss and this layer: look at the batch of this step (a "
            "label, a length, an outlier)"
        )


def _times(names: Sequence[str], times: Mapping[int, float], index: int) -> str:
    return f"{printable(names[index])} ({times[index]:.3g} times its running mean)"
