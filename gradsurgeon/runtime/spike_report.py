"""The report of a gradient that is far larger than the gradients before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradsurgeon.actions import Spikes
from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.runtime.nonfinite_report import TrapReport
from gradsurgeon.runtime.running_norms import JudgedNorms, NormsOnHost

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
    places = [p for p, norm in enumerate(norms) if not (math.isfinite(norm) and passed[p] >= norm)]
    if judged.spikes.over_rule:
        head = f"spike: over {count(len(judged.tensors), 'gradient')} {_above(judged.spikes, norms[0], before[:, 0])}"
        rows = list(_by_share(names, judged))
        lines = ["each parameter's share of the squared norm:", *_table(rows)]
    else:
        places.sort(key=lambda place: -_excess(norms[place], passed[place]))
        told = [_above(judged.spikes, norms[place], before[:, place]) for place in places[:_SHOWN]]
        rows = [
            (names[judged.tensors[place]], text) for place, text in zip(places, told, strict=False)
        ]
        head = f"spike: {len(places)} of {count(len(norms), 'gradient')} {'is' if len(places) == 1 else 'are'} "
        head += (
            "above the bound of its own past"
            if len(places) == 1
            else "above the bounds of their own past"
        )
        lines = ["the largest first:", *_table(rows)]
        if len(places) > _SHOWN:
            lines.append(f"    ... {len(places) - _SHOWN} more")
    if judged.spikes.over_rule or judged.spikes.bound.keeps_mean:
        lines += _growth(names, judged, arrived)
    return TrapReport(rows[0][0], head, lines, expect="", reduced=False)


def told_of_cut(names: Sequence[str], judged: JudgedNorms, known: NormsOnHost) -> tuple[str, str]:
    """Return a line on gradients that `clip` has cut, and the parameter that was cut most or carries most of the norm."""
    norms, passed, before, cut, (largest, carrier) = known
    place = max(cut, key=lambda place: _excess(norms[place], passed[place]))
    told = f"{_above(judged.spikes, norms[place], before[:, place])}: cut to {passed[place]:.3g}"
    if judged.spikes.over_rule:
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
    return f"the norm {norm:.3g}" + (
        "" if bound is None else f" is above {bound[0]:.3g} ({bound[1]})"
    )


def _excess(norm: float, passed: float) -> float:
    return norm / passed if passed > 0 and math.isfinite(norm) else math.inf


def _by_share(names: Sequence[str], judged: JudgedNorms) -> Iterator[tuple[str, str]]:
    each, usual = judged.each.tolist(), judged.usual.tolist()
    total = sum(norm * norm for norm in each)
    rows = sorted(zip(judged.tensors, each, usual, strict=True), key=lambda row: -_size(row[1]))
    for tensor, norm, mean in rows[:_SHOWN]:
        if not math.isfinite(norm):
            yield names[tensor], f"norm {norm}"
            continue
        share = f"{norm * norm / total:4.0%}  " if math.isfinite(total) and total else ""
        times = f", {norm / mean:.3g} times its running mean {mean:.3g}" if mean else ""
        yield names[tensor], f"{share}norm {norm:.3g}{times}"
    if len(rows) > _SHOWN:
        rest = sum(norm * norm for _, norm, _ in rows[_SHOWN:]) / total if total else 0.0
        yield f"{len(rows) - _SHOWN} more", f"{rest:4.0%}" if math.isfinite(rest) else ""


def _growth(
    names: Sequence[str], judged: JudgedNorms, arrived: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Report where, in the order of backward, gradients begin to exceed their past; nothing if the order is unknown."""
    times = {
        tensor: norm / mean
        for tensor, norm, mean in zip(
            judged.tensors, judged.each.tolist(), judged.usual.tolist(), strict=True
        )
        if mean and math.isfinite(norm)
    }
    order = [group for group in arrived if not times.keys().isdisjoint(group)]
    is_known = times.keys() <= {tensor for group in order for tensor in group}
    # If all come from one node, as in a fully compiled model, they have no order.
    if not is_known or len(order) < min(len(times), 2):
        return
    if (largest := max(times.values(), default=0.0)) < _LEAST:
        return
    # Half of the growth on a logarithmic scale.
    half = math.sqrt(largest)
    first = next(place for place, group in enumerate(order) if _largest(times, group)[0] >= half)
    grown, tensor = _largest(times, order[first])
    before = max((_largest(times, group)[0] for group in order[:first]), default=0.0)
    # Nearly all of the growth in one place outweighs growth by the loss, or by chance, before it.
    if before and grown >= before * (_LEAST if before < _LEAST else half**1.5):
        earlier = _largest(times, order[first - 1])[1]
        yield (
            f"in the order of backward the spike begins at {_times(names, times, tensor)}; "
            f"{_times(names, times, earlier)} right before it: look at this layer, and at the layers between the two"
        )
    # An earlier gradient that the rule does not judge could be the origin.
    elif not first and order[0] is arrived[0] and times.keys() >= set(order[0]):
        begun = f"the first gradient of the backward pass is large already, {_times(names, times, tensor)}"
        if min(times[one] for one in order[0]) >= _GROWN:
            yield (
                f"{begun}: the spike came with the loss, or from the operations between the loss and this layer: look "
                "at the batch of this step (a label, a length, an outlier)"
            )


def _largest(times: Mapping[int, float], group: Sequence[int]) -> tuple[float, int]:
    return max((times[tensor], tensor) for tensor in group if tensor in times)


def _times(names: Sequence[str], times: Mapping[int, float], tensor: int) -> str:
    return f"{printable(names[tensor])} ({times[tensor]:.3g} times its running mean)"


def _size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(printable(name)) for name, _ in rows)
    return [f"    {printable(name).ljust(width)}  {text}".rstrip() for name, text in rows]
