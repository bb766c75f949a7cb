"""The reports of traps: non-finite tensors with their evidence, refused statistics, and spikes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import Spikes
from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.runtime.context import Flag
from gradsurgeon.runtime.running_norms import JudgedNorms
from gradsurgeon.runtime.training_events import GradientSnapshot
from gradsurgeon.tensors.measure import NonfiniteCount, Norms, as_dict

_SHOWN = 12
_EDITED = (
    "all of them were finite after backward: look at how the script changes gradients afterwards (a clip, a hook, an "
    "edit of `.grad`)"
)
_PARTS = "each rank keeps its part of the sum: any rank may have added the NaN or Inf"


@dataclass(frozen=True, slots=True)
class TrapReport:
    """The report of a trap on the first bad tensor. The outcome of the step comes between head and lines."""

    name: str
    head: str
    lines: list[str]
    # The ranks on which the tensor became non-finite, if known.
    ranks: tuple[int, ...] = ()
    # The consequence if the update goes on.
    expect: str = ": expect non-finite weights"
    # Whether ranks reduce the tensors, so another rank can be the cause.
    reduced: bool = True
    # Whether this rank contributed NaN or Inf to an average.
    guilty: bool = False
    # The modules with a non-finite tensor, if modules are watched.
    modules: tuple[str, ...] = ()
    # The parameters with a non-finite gradient at the update.
    bad: tuple[str, ...] = ()

    def caused_by(self, ranks: tuple[int, ...]) -> TrapReport:
        """Return the report with the ranks that contributed NaN or Inf, if they are known."""
        if not (ranks and self.reduced):
            return self
        cause = f"{_dist.named(ranks)} contributed NaN or Inf"
        return replace(self, head=f"{self.head}; {cause}", ranks=ranks)


@dataclass(frozen=True)
class GradientEvidence:
    """The norms and counts of the gradients of one update: after each backward pass, and right before the update."""

    snapshots: Sequence[GradientSnapshot]
    tensors: Sequence[int]
    # The tensors that are non-finite at the update.
    now: dict[int, NonfiniteCount]
    # The norms at the update of the parts of this rank, if they were taken.
    norms: Norms = ()
    # The tensors with non-finite parts on other ranks, right after the last pass.
    elsewhere: frozenset[int] = frozenset()
    # The tensors of which this rank holds a part.
    divided: frozenset[int] = frozenset()

    @cached_property
    def before(self) -> frozenset[int]:
        if not self.snapshots:
            return frozenset()
        norms = as_dict(self.norms)
        # The norm of finite elements can overflow, and then it still does at the update.
        return self.elsewhere.union(
            tensor
            for tensor, norm in as_dict(self.snapshots[-1].norms).items()
            if math.isnan(norm)
            or (math.isinf(norm) and (tensor in self.now or math.isfinite(norms.get(tensor, norm))))
        )

    @cached_property
    def repaired(self) -> frozenset[int]:
        return self.before.intersection(self.tensors).difference(self.now)

    @property
    def _guilty(self) -> bool:
        # The first pass that reduced a non-finite gradient decides: later passes add to gradients that are non-finite already.
        # A rank that did not use its part of the model contributed nothing, and got these gradients from other ranks.
        wanted = self.before.union(self.now)
        for snapshot in self.snapshots:
            norms = as_dict(snapshot.norms)
            contributed = snapshot.done.contributed
            spoilt = {
                t for t in wanted & contributed.keys() if not math.isfinite(norms.get(t, 0.0))
            }
            if spoilt:
                return any(not bool(contributed[tensor].isfinite()) for tensor in spoilt)
        return False

    def report(self, names: Sequence[str], why: str = "") -> TrapReport:
        """Return a report on the border after the first pass that shows one, else at the update."""
        passes, edited = len(self.snapshots), False
        for number, snapshot in enumerate(self.snapshots, 1):
            if bad := self._nonfinite(snapshot):
                moment = "after backward"
                if passes > 1:
                    moment += f", micro-batch {number} of {passes}"
                # Some tensors keep a gradient from an earlier pass and received none in this pass.
                order, norms = (*snapshot.order, *snapshot.tensors), snapshot.norms
                break
        else:
            moment, order, bad, norms = (
                "right before the update",
                tuple(self.tensors),
                self.now,
                self.norms,
            )
            if passes:
                moment += ", and finite after backward: something in between did it"
                edited = True
                order = (*self.snapshots[-1].order, *order)
        # The norm of a part is not the norm of the whole.
        told = {t: norm for t, norm in as_dict(norms).items() if t not in self.divided}
        report = gradient_report(names, moment, order, bad, told, edited=edited)
        bad_now = tuple(names[tensor] for tensor in self.now)
        return replace(report, head=why + report.head, guilty=self._guilty, bad=bad_now)

    def _nonfinite(self, snapshot: GradientSnapshot) -> dict[int, NonfiniteCount]:
        # The counts at the update hold for the pass only if the script has not clipped since.
        known = self.now if _finite(self.snapshots[-1].norms) == _finite(self.norms) else {}
        found = {
            tensor: known.get(tensor, uncounted(norm))
            for tensor, norm in as_dict(snapshot.norms).items()
            if not math.isfinite(norm) and tensor in self.before
        }
        if snapshot is self.snapshots[-1]:
            found |= {t: self.now[t] for t in self.elsewhere if t in self.now}
        return found


def uncounted(norm: float) -> NonfiniteCount:
    """Return the kind of a gradient with a non-finite norm, without a count."""
    return NonfiniteCount("NaN" if math.isnan(norm) else "Inf", 0)


def _finite(norms: Norms) -> dict[int, float | None]:
    return {i: norm if math.isfinite(norm) else None for i, norm in as_dict(norms).items()}


def gradient_report(
    names: Sequence[str],
    moment: str,
    arrived: Iterable[int],
    bad: Mapping[int, NonfiniteCount],
    norms: Mapping[int, float],
    *,
    edited: bool = False,
) -> TrapReport:
    """Return a report on finite and non-finite gradients, in the order in which backward delivered them.

    Gradients that were ``edited`` after backward became non-finite then, and the order means nothing.
    """
    order = tuple(dict.fromkeys(arrived))
    labels = [printable(names[tensor]) for tensor in order]
    first = next(place for place, tensor in enumerate(order) if tensor in bad)
    width = max(map(len, labels))
    rows = [
        _row(label.ljust(width), bad.get(tensor), norms.get(tensor))
        for tensor, label in zip(order, labels, strict=True)
    ]
    lines = ["in the order in which backward produced them:", *_window(rows, first)]
    advice = _EDITED if edited else _advice(labels, first, all_bad=len(bad) == len(order))
    lines.append(advice)
    ranks = bad[order[first]].ranks
    if ranks:
        lines.append(_PARTS)
    head = f"{len(bad)} of {len(order)} gradients are not finite {moment}"
    return TrapReport(names[order[first]], head, lines, ranks)


def _row(label: str, bad: NonfiniteCount | None, norm: float | None) -> str:
    if bad is None:
        return f"    finite  {label}" + ("" if norm is None else f"  norm {norm:.3g}")
    if not bad.number:
        return f"  > {bad.kind}  {label}"
    part = f", in the part of {_dist.named(bad.ranks)}" if bad.ranks else ""
    plural = "s" if bad.number > 1 else ""
    return f"  > {bad.kind:<6}  {label}  {bad.number:,} element{plural}{part}"


def _advice(labels: Sequence[str], first: int, *, all_bad: bool) -> str:
    culprit = labels[first]
    if first > 0:
        return (
            f"the border lies between {labels[first - 1]} (still finite) and {culprit} "
            "(first that is not)"
        )
    if not all_bad:
        return (
            f"{culprit}, the first one that backward reached, is non-finite already: look at the loss, and at the "
            "operations after this layer in the forward pass"
        )
    # Any NaN of the forward pass reaches the loss, and so every gradient.
    return (
        f"every gradient is non-finite, starting with {culprit}, the first one that backward reached: check the inputs of "
        "the model, its weights and the loss"
    )


def threshold_report(
    stat: str, names: Sequence[str], values: Sequence[float], tripped: Sequence[bool]
) -> TrapReport:
    width = max(len(printable(name)) for name in names)
    rows = [
        f"  {'> refused' if bad else '  let pass'}  {printable(name).ljust(width)}  {stat} {value:.3g}"
        for name, value, bad in zip(names, values, tripped, strict=True)
    ]
    first = tripped.index(True)
    head = f"{sum(tripped)} of {len(names)} gradients are refused for their {stat}"
    lines = ["in the order of the model:", *_window(rows, first)]
    return TrapReport(names[first], head, lines, expect="", reduced=False)


def activation_report(flags: Sequence[tuple[Flag, int]]) -> TrapReport:
    bad = [place for place, (_, count) in enumerate(flags) if count]
    labels = [f"the {flag.what} of {printable(flag.name)}" for flag, _ in flags]
    rows = [
        f"  > non-finite  {label}  {count:,} elements" if count else f"    finite      {label}"
        for label, (_, count) in zip(labels, flags, strict=True)
    ]
    first = bad[0]
    head = f"{len(bad)} of {len(flags)} tensors are not finite"
    last = f"the first non-finite one is {labels[first]}"
    lines = ["in the order in which they came:", *_window(rows, first), last]
    modules = tuple(flag.name for flag, count in flags if count)
    return TrapReport(flags[first][0].name, head, lines, reduced=False, modules=modules)


def _window(rows: list[str], first: int) -> list[str]:
    """Return the rows around the first bad one, with counts of the rows that are left out."""
    if len(rows) <= _SHOWN:
        return rows
    start = max(0, min(first - _SHOWN // 2, len(rows) - _SHOWN))
    stop = start + _SHOWN
    above = [f"    ... {start} more before"] if start else []
    below = [f"    ... {len(rows) - stop} more after"] if stop < len(rows) else []
    return [*above, *rows[start:stop], *below]


_MOST_SPIKES = 8
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
        told = [
            _above(judged.spikes, norms[place], before[:, place]) for place in places[:_MOST_SPIKES]
        ]
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
        if len(places) > _MOST_SPIKES:
            lines.append(f"    ... {len(places) - _MOST_SPIKES} more")
    if judged.spikes.over_rule or judged.spikes.bound.keeps_mean:
        lines += _growth(names, judged, arrived)
    return TrapReport(rows[0][0], head, lines, expect="", reduced=False)


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
    return f"the norm {norm:.3g}" + (
        "" if bound is None else f" is above {bound[0]:.3g} ({bound[1]})"
    )


def _excess(norm: float, passed: float) -> float:
    return norm / passed if passed > 0 and math.isfinite(norm) else math.inf


def _by_share(names: Sequence[str], judged: JudgedNorms) -> Iterator[tuple[str, str]]:
    each, usual = judged.each.tolist(), judged.usual.tolist()
    total = sum(norm * norm for norm in each)
    rows = sorted(zip(judged.tensors, each, usual, strict=True), key=lambda row: -_size(row[1]))
    for tensor, norm, mean in rows[:_MOST_SPIKES]:
        if not math.isfinite(norm):
            yield names[tensor], f"norm {norm}"
            continue
        share = f"{norm * norm / total:4.0%}  " if math.isfinite(total) and total else ""
        times = f", {norm / mean:.3g} times its running mean {mean:.3g}" if mean else ""
        yield names[tensor], f"{share}norm {norm:.3g}{times}"
    if len(rows) > _MOST_SPIKES:
        rest = sum(norm * norm for _, norm, _ in rows[_MOST_SPIKES:]) / total if total else 0.0
        yield f"{len(rows) - _MOST_SPIKES} more", f"{rest:4.0%}" if math.isfinite(rest) else ""


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
