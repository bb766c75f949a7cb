"""The reports of traps: non-finite tensors with their evidence, refused statistics, and spikes with their beginning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count, grid
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.passes import GradientSnapshot
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.measure import NonfiniteCount, Norms, as_dict

GOES_ON = "the update goes on (`then: warn`)"
_SHOWN = 12
_EDITED = "all were finite after backward: look at how the script changes gradients afterwards (a clip, an edit of `.grad`)"


@dataclass(frozen=True, slots=True)
class TrapReport:
    """The report of a trap on the first bad tensor. The outcome of the step comes between head and lines."""

    name: str
    head: str
    lines: list[str]
    # The ranks on which the tensor became non-finite, if known.
    ranks: tuple[int, ...] = ()
    # The outcome under `then: warn`.
    goes_on: str = f"{GOES_ON}: expect non-finite weights"
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
    indices: Sequence[int]
    # The tensors that are non-finite at the update.
    now: dict[int, NonfiniteCount]
    # The norms at the update of the parts of this rank, if they were taken.
    norms: Norms = ()
    # The tensors of which this rank holds a part.
    divided: frozenset[int] = frozenset()

    @cached_property
    def _after(self) -> dict[int, float]:
        return as_dict(self.snapshots[-1].norms) if self.snapshots else {}

    @cached_property
    def before(self) -> frozenset[int]:
        norms = as_dict(self.norms)
        found = {index for index, norm in self._after.items() if not math.isfinite(norm)}
        # The norm of finite elements can overflow, and then it still does at the update.
        overflowed = {
            index
            for index in found - self.now.keys()
            if math.isinf(self._after[index]) and not math.isfinite(norms.get(index, math.inf))
        }
        return frozenset(found - overflowed)

    @cached_property
    def repaired(self) -> frozenset[int]:
        return self.before.intersection(self.indices).difference(self.now)

    def concerns(self, indices: Iterable[int]) -> bool:
        """Tell whether one of some gradients is non-finite."""
        return not self.now.keys().isdisjoint(indices)

    @property
    def _guilty(self) -> bool:
        # The first pass that reduced a non-finite gradient decides: later passes add to gradients that are non-finite already.
        # A rank that did not use its part of the model contributed nothing, and got these gradients from other ranks.
        wanted = self.before.union(self.now)
        for snapshot in self.snapshots:
            norms, contributed = as_dict(snapshot.norms), snapshot.done.contributed
            there = wanted & contributed.keys()
            if spoilt := [t for t in there if not math.isfinite(norms.get(t, 0.0))]:
                return any(not bool(contributed[index].isfinite()) for index in spoilt)
        return False

    def report(self, names: Sequence[str], why: str = "") -> TrapReport:
        """Return a report on the border after the first pass that shows one, else at the update."""
        order, norms, passes = tuple(self.indices), self.norms, len(self.snapshots)
        moment, bad, edited = "right before the update", self.now, passes > 0
        for number, snapshot in enumerate(self.snapshots, 1):
            if found := self._nonfinite(snapshot):
                moment, bad, edited = "after backward", found, False
                if passes > 1:
                    moment += f", micro-batch {number} of {passes}"
                # Some tensors keep a gradient from an earlier pass and received none in this pass.
                order, norms = (*snapshot.order, *snapshot.indices), snapshot.norms
                break
        if edited:
            moment += ", and finite after backward: something in between did it"
            order = (*self.snapshots[-1].order, *order)
        # The norm of a part is not the norm of the whole.
        told = {t: norm for t, norm in as_dict(norms).items() if t not in self.divided}
        report = gradient_report(names, moment, order, bad, told, edited=edited)
        bad_now = tuple(names[index] for index in self.now)
        return replace(report, head=why + report.head, guilty=self._guilty, bad=bad_now)

    def _nonfinite(self, snapshot: GradientSnapshot) -> dict[int, NonfiniteCount]:
        # The counts at the update hold for the pass only if the script has not clipped since.
        known = self.now if _finite(self._after) == _finite(as_dict(self.norms)) else {}
        return {
            index: known.get(index, uncounted(norm))
            for index, norm in as_dict(snapshot.norms).items()
            if not math.isfinite(norm) and index in self.before
        }


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
    """Return a report in the order of backward, which means nothing for gradients ``edited`` since."""
    order = tuple(dict.fromkeys(arrived))
    labels = [printable(names[index]) for index in order]
    first = next(place for place, index in enumerate(order) if index in bad)
    rows = [
        (
            bad[index].kind if index in bad else "",
            label,
            _note(bad.get(index), norms.get(index)),
        )
        for index, label in zip(order, labels, strict=True)
    ]
    lines = _table("in the order in which backward produced them:", "finite", rows)
    if edited:
        lines.append(_EDITED)
    elif first > 0:
        before, bad_one = labels[first - 1], labels[first]
        lines.append(
            f"the border lies between {before} (still finite) and {bad_one} (first that is not)"
        )
    else:
        # Any NaN of the forward pass reaches the loss, and so every gradient.
        lines.append(
            f"{labels[first]}, the first one that backward reached, is non-finite already: look at the loss, at the "
            "operations after this layer in the forward pass, and at inputs and weights"
        )
    head = f"{len(bad)} of {len(order)} gradients are not finite {moment}"
    return TrapReport(names[order[first]], head, lines)


def _note(bad: NonfiniteCount | None, norm: float | None) -> str:
    if bad is None:
        return "" if norm is None else f"norm {norm:.3g}"
    return count(bad.number, "element") if bad.number else ""


def threshold_report(
    stat: str, names: Sequence[str], values: Sequence[float], tripped: Sequence[bool]
) -> TrapReport:
    rows = [
        ("refused" * bad, printable(name), f"{stat} {value:.3g}")
        for name, value, bad in zip(names, values, tripped, strict=True)
    ]
    head = f"{sum(tripped)} of {len(names)} gradients are refused for their {stat}"
    lines = _table("in the order of the model:", "let pass", rows)
    return TrapReport(names[tripped.index(True)], head, lines, goes_on=GOES_ON, reduced=False)


def activation_report(flags: Sequence[tuple[Flag, int]]) -> TrapReport:
    rows = [
        (
            "non-finite" * bool(bad),
            f"the {flag.what} of {printable(flag.name)}",
            f"{bad:,} elements" * bool(bad),
        )
        for flag, bad in flags
    ]
    lines = _table("in the order in which they came:", "finite", rows)
    lines.append(f"the first non-finite one is {next(label for word, label, _ in rows if word)}")
    modules = tuple(flag.name for flag, bad in flags if bad)
    head = f"{len(modules)} of {len(flags)} tensors are not finite"
    return TrapReport(modules[0], head, lines, reduced=False, modules=modules)


def _table(title: str, fine: str, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a title and aligned rows around the first bad one, with counts of the rows that are left out.

    A row is a word, a label and a note; it is ``fine`` without a word.
    """
    first = next(place for place, (word, _, _) in enumerate(rows) if word)
    cells = [(f"> {word}" if word else f"  {fine}", label, note) for word, label, note in rows]
    start = max(0, min(first - _SHOWN // 2, len(rows) - _SHOWN))
    above = [f"    ... {start} more before"] if start else []
    after = len(rows) - start - _SHOWN
    below = [f"    ... {after} more after"] if after > 0 else []
    return [title, *above, *grid(cells[start : start + _SHOWN]), *below]
