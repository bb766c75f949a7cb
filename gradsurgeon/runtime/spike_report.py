"""The report of a spike: which parameters carry it, and where in the order of backward it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
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
    spikes = judged.spikes
    total = count(len(judged.indices), "gradient")
    if spikes.over_rule:
        norm, passed = torch.cat([judged.norms, judged.passed]).tolist()
        head = f"spike: over {total} {_above(spikes, norm, passed, judged.reported.cpu()[:, 0])}"
        title = "each parameter's share of the squared norm:"
        rows = _by_share(judged)
    else:
        rows = _by_excess(judged)
        head = f"spike: {len(rows)} of {total} above the bound of its own past"
        title = "the largest first:"
    shown = [(printable(names[index]), text) for index, text in rows[:_SPIKES_SHOWN]]
    lines = [title, *grid(shown)]
    if len(rows) > _SPIKES_SHOWN:
        lines.append(f"    ... {len(rows) - _SPIKES_SHOWN} more")
    if spikes.over_rule or spikes.bound.keeps_mean:
        lines += _beginning(names, judged, arrived)
    return TrapReport(names[rows[0][0]], head, lines, goes_on=GOES_ON, reduced=False)


def loss_report(names: Sequence[str], judged: JudgedNorms) -> TrapReport:
    """Report the losses above their bounds. Waits for the device."""
    (index, reason), *others = _by_excess(judged, names)
    lines = [text for _, text in others]
    return TrapReport(names[index], f"spike: {reason}", lines, goes_on=GOES_ON, reduced=False)


def describe_spike(
    names: Sequence[str], judged: JudgedNorms, numbers: Tensor, noun: str, *, acts: bool
) -> tuple[str, str]:
    """Return a line on the norm farthest above its bound, and its parameter; no name for a norm over all."""
    norms, passed, before = judged.read(numbers)
    excesses = {}
    for place, norm in enumerate(norms):
        if passed[place] < norm:
            excesses[place] = _excess(norm, passed[place])
    place = max(excesses, key=excesses.__getitem__)
    reason = _above(judged.spikes, norms[place], passed[place], before[:, place])
    outcome = f"cut to {passed[place]:.3g}"
    if judged.spikes.then == "warn":
        outcome = GOES_ON
    elif not acts:
        outcome = f"would be {outcome}"
    cut = f"{reason}: {outcome}"
    if judged.spikes.over_rule:
        return f"over {count(len(judged.indices), noun)} {cut}", ""
    name = names[judged.indices[place]]
    return f"of {printable(name)} {cut}", name


def _above(spikes: Spikes, norm: float, passed: float, kept: Tensor, noun: str = "the norm") -> str:
    """Return the reason, in words, why a number is a spike."""
    if math.isnan(norm):
        return f"{noun} is NaN"
    if math.isinf(norm):
        return f"{noun} is infinite"
    bound = spikes.bound.bounds(kept.tolist(), passed)
    if bound is None:
        return f"{noun} {norm:.3g}"
    return f"{noun} {norm:.3g} is above {bound[0]:.3g} ({bound[1]})"


def _excess(norm: float, passed: float) -> float:
    if passed > 0 and math.isfinite(norm):
        return norm / passed
    return math.inf


def _by_excess(judged: JudgedNorms, nouns: Sequence[str] = ()) -> list[tuple[int, str]]:
    """Return the parameters above their own bounds, the largest excess first, with the reason."""
    norms = judged.norms.tolist()
    passed = judged.passed.tolist()
    before = judged.reported.cpu()
    excesses = {}
    for place, norm in enumerate(norms):
        # A NaN in either number fails every comparison.
        is_below = passed[place] >= norm
        if not is_below or norm == math.inf:
            excesses[place] = _excess(norm, passed[place])
    rows = []
    # With `reverse`, places of equal excess keep their order.
    for place in sorted(excesses, key=excesses.__getitem__, reverse=True):
        index = judged.indices[place]
        noun = printable(nouns[index]) if nouns else "the norm"
        reason = _above(judged.spikes, norms[place], passed[place], before[:, place], noun)
        rows.append((index, reason))
    return rows


def _norms_and_means(judged: JudgedNorms) -> list[tuple[int, float, float]]:
    """Return each parameter with its norm and its running mean. Waits for the device."""
    return list(zip(judged.indices, judged.each.tolist(), judged.usual.tolist(), strict=True))


def _by_share(judged: JudgedNorms) -> list[tuple[int, str]]:
    """Return the parameters that carry a norm, the largest first, with a text."""
    norms = _norms_and_means(judged)
    norms.sort(key=_nan_first)
    total = sum(norm * norm for _, norm, _ in norms)
    has_shares = math.isfinite(total) and total > 0
    rows = []
    for index, norm, mean in norms:
        text = f"norm {norm:.3g}"
        if has_shares:
            text = f"{norm * norm / total:4.0%}  {text}"
        if mean and math.isfinite(norm):
            text += f", {norm / mean:.3g} times its running mean {mean:.3g}"
        rows.append((index, text))
    return rows


def _nan_first(row: tuple[int, float, float]) -> float:
    """Return the sorting key that puts NaN first, then the largest norm."""
    norm = row[1]
    return -math.inf if math.isnan(norm) else -norm


def _beginning(
    names: Sequence[str], judged: JudgedNorms, arrived: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Report where, in the order of backward, gradients begin to exceed their past; nothing if the order is unknown."""
    times = {}
    for index, norm, mean in _norms_and_means(judged):
        if mean and math.isfinite(norm):
            times[index] = norm / mean
    order = [group for group in arrived if not times.keys().isdisjoint(group)]
    is_known = times.keys() <= set(chain.from_iterable(order))
    largest = max(times.values(), default=0.0)
    # If all come from one node, as in a fully compiled model, they have no order.
    has_order = is_known and len(order) >= min(len(times), 2)
    if not has_order or largest < _LEAST:
        return
    peaks = []
    for group in order:
        judged_indices = times.keys() & group
        peaks.append(max((times[index], index) for index in judged_indices))
    # Half of the growth on a logarithmic scale.
    half = math.sqrt(largest)
    before = 0.0
    first = 0
    while not peaks[first][0] >= half:
        before = max(before, peaks[first][0])
        first += 1
    grown, index = peaks[first]
    # Nearly all of the growth in one place outweighs growth by the loss, or by chance, before it.
    needed = _LEAST if before < _LEAST else half**1.5
    if before and grown >= before * needed:
        yield (
            f"in the order of backward the spike begins at {_times(names, times, index)}; "
            f"{_times(names, times, peaks[first - 1][1])} right before it: look at this layer, and at the layers between "
            "the two"
        )
        return
    # An earlier gradient that the rule does not judge could be the origin.
    is_start = first == 0 and order[0] is arrived[0]
    if not is_start or not times.keys() >= set(order[0]):
        return
    if min(times[start] for start in order[0]) >= _GROWN:
        yield (
            f"the first gradient of the backward pass is large already, {_times(names, times, index)}: the spike came "
            "with the loss, or from the operations between the loss and this layer: look at the batch of this step (a "
            "label, a length, an outlier)"
        )


def _times(names: Sequence[str], times: Mapping[int, float], index: int) -> str:
    return f"{printable(names[index])} ({times[index]:.3g} times its running mean)"
