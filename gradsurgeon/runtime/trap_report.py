"""The reports of traps: non-finite tensors with their evidence, and refused statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.runtime.context import Flag
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
    def _after(self) -> dict[int, float]:
        """The norms after the last backward pass."""
        return as_dict(self.snapshots[-1].norms) if self.snapshots else {}

    @cached_property
    def before(self) -> frozenset[int]:
        norms = as_dict(self.norms)
        found = {tensor for tensor, norm in self._after.items() if not math.isfinite(norm)}
        # The norm of finite elements can overflow, and then it still does at the update.
        overflowed = {
            tensor
            for tensor in found - self.now.keys()
            if math.isinf(self._after[tensor]) and not math.isfinite(norms.get(tensor, math.inf))
        }
        return self.elsewhere.union(found - overflowed) if self.snapshots else frozenset()

    @cached_property
    def repaired(self) -> frozenset[int]:
        return self.before.intersection(self.tensors).difference(self.now)

    @property
    def _guilty(self) -> bool:
        # The first pass that reduced a non-finite gradient decides: later passes add to gradients that are non-finite already.
        # A rank that did not use its part of the model contributed nothing, and got these gradients from other ranks.
        wanted = self.before.union(self.now)
        for snapshot in self.snapshots:
            norms, contributed = as_dict(snapshot.norms), snapshot.done.contributed
            there = wanted & contributed.keys()
            if spoilt := [t for t in there if not math.isfinite(norms.get(t, 0.0))]:
                return any(not bool(contributed[tensor].isfinite()) for tensor in spoilt)
        return False

    def report(self, names: Sequence[str], why: str = "") -> TrapReport:
        """Return a report on the border after the first pass that shows one, else at the update."""
        order, norms, passes = tuple(self.tensors), self.norms, len(self.snapshots)
        moment, bad, edited = "right before the update", self.now, passes > 0
        for number, snapshot in enumerate(self.snapshots, 1):
            if found := self._nonfinite(snapshot):
                moment, bad, edited = "after backward", found, False
                if passes > 1:
                    moment += f", micro-batch {number} of {passes}"
                # Some tensors keep a gradient from an earlier pass and received none in this pass.
                order, norms = (*snapshot.order, *snapshot.tensors), snapshot.norms
                break
        if edited:
            moment += ", and finite after backward: something in between did it"
            order = (*self.snapshots[-1].order, *order)
        # The norm of a part is not the norm of the whole.
        told = {t: norm for t, norm in as_dict(norms).items() if t not in self.divided}
        report = gradient_report(names, moment, order, bad, told, edited=edited)
        bad_now = tuple(names[tensor] for tensor in self.now)
        return replace(report, head=why + report.head, guilty=self._guilty, bad=bad_now)

    def _nonfinite(self, snapshot: GradientSnapshot) -> dict[int, NonfiniteCount]:
        # The counts at the update hold for the pass only if the script has not clipped since.
        known = self.now if _finite(self._after) == _finite(as_dict(self.norms)) else {}
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


def _finite(norms: Mapping[int, float]) -> dict[int, float | None]:
    return {i: norm if math.isfinite(norm) else None for i, norm in norms.items()}


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
    kinds = [f"{bad[tensor].kind if tensor in bad else 'finite':6}" for tensor in order]
    notes = [_note(bad.get(tensor), norms.get(tensor)) for tensor in order]
    marked = [tensor in bad for tensor in order]
    lines = _table("in the order in which backward produced them:", marked, kinds, labels, notes)
    if edited:
        lines.append(_EDITED)
    elif first > 0:
        lines.append(
            f"the border lies between {labels[first - 1]} (still finite) and {labels[first]} "
            "(first that is not)"
        )
    elif len(bad) < len(order):
        lines.append(
            f"{labels[first]}, the first one that backward reached, is non-finite already: look at the loss, and at the "
            "operations after this layer in the forward pass"
        )
    else:
        # Any NaN of the forward pass reaches the loss, and so every gradient.
        lines.append(
            f"every gradient is non-finite, starting with {labels[first]}, the first one that backward reached: check the "
            "inputs of the model, its weights and the loss"
        )
    if ranks := bad[order[first]].ranks:
        lines.append(_PARTS)
    head = f"{len(bad)} of {len(order)} gradients are not finite {moment}"
    return TrapReport(names[order[first]], head, lines, ranks)


def _note(bad: NonfiniteCount | None, norm: float | None) -> str:
    if bad is None:
        return "" if norm is None else f"norm {norm:.3g}"
    if not bad.number:
        return ""
    part = f", in the part of {_dist.named(bad.ranks)}" if bad.ranks else ""
    return f"{bad.number:,} element{'s' if bad.number > 1 else ''}{part}"


def threshold_report(
    stat: str, names: Sequence[str], values: Sequence[float], tripped: Sequence[bool]
) -> TrapReport:
    labels, first = list(map(printable, names)), tripped.index(True)
    words = ["refused" if bad else "let pass" for bad in tripped]
    notes = [f"{stat} {value:.3g}" for value in values]
    head = f"{sum(tripped)} of {len(names)} gradients are refused for their {stat}"
    lines = _table("in the order of the model:", tripped, words, labels, notes)
    return TrapReport(names[first], head, lines, expect="", reduced=False)


def activation_report(flags: Sequence[tuple[Flag, int]]) -> TrapReport:
    bad = [count > 0 for _, count in flags]
    labels = [f"the {flag.what} of {printable(flag.name)}" for flag, _ in flags]
    words = ["non-finite" if count else "finite" for _, count in flags]
    notes = [f"{count:,} elements" if count else "" for _, count in flags]
    lines = _table("in the order in which they came:", bad, words, labels, notes)
    lines.append(f"the first non-finite one is {labels[bad.index(True)]}")
    head = f"{sum(bad)} of {len(flags)} tensors are not finite"
    modules = tuple(flag.name for flag, count in flags if count)
    return TrapReport(modules[0], head, lines, reduced=False, modules=modules)


def _table(
    title: str,
    marked: Sequence[bool],
    words: Sequence[str],
    labels: Sequence[str],
    notes: Sequence[str],
) -> list[str]:
    """Return a title and aligned rows around the first marked one, with counts of the rows that are left out."""
    start = max(0, min(marked.index(True) - _SHOWN // 2, len(labels) - _SHOWN))
    shown = range(start, min(start + _SHOWN, len(labels)))
    first, second = (max(len(texts[place]) for place in shown) for texts in (words, labels))
    rows = [
        f"  {'>' if marked[place] else ' '} {words[place]:{first}}  {labels[place]:{second}}  {notes[place]}"
        for place in shown
    ]
    above = [f"    ... {start} more before"] if start else []
    below = [f"    ... {len(labels) - shown.stop} more after"] if shown.stop < len(labels) else []
    return [title, *above, *map(str.rstrip, rows), *below]
