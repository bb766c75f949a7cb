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
from gradsurgeon.tensors.measure import UNCOUNTED, NonfiniteCount, Norms, as_dict

GOES_ON = "the update goes on (`then: warn`)"
_SHOWN = 12
_EDITED = "all were finite after backward: look at how the script changes gradients afterwards (a clip, an edit of `.grad`)"
_OF_OTHERS = (
    "they were finite on this rank before ranks averaged them: look at the reports of other ranks"
)
_AVERAGED = "ranks have averaged these gradients: see the reports of all ranks"
_ELSEWHERE = "if no other rank reports NaN or Inf, the average itself overflowed"


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
    # Whether this rank contributed NaN or Inf to an average; ``None`` if no average was non-finite.
    guilty: bool | None = None
    # The modules with a non-finite tensor, if modules are watched.
    modules: tuple[str, ...] = ()
    # The parameters with a non-finite gradient at the update.
    bad: tuple[str, ...] = ()
    # Where to look, if no diagnosis says more.
    hint: str = ""

    def caused_by(self, ranks: tuple[int, ...]) -> TrapReport:
        """Return the report with the ranks that contributed NaN or Inf, if they are known."""
        if not self.reduced or not (ranks or self.guilty is False):
            return self
        # Later trips show their head alone.
        cause = _OF_OTHERS
        if ranks:
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
    # Whether an engine has averaged the gradients over ranks before they were seen.
    averaged: bool = False

    @cached_property
    def _after(self) -> dict[int, float]:
        return as_dict(self.snapshots[-1].norms) if self.snapshots else {}

    @cached_property
    def before(self) -> frozenset[int]:
        """The gradients that were non-finite after the last pass."""
        norms = as_dict(self.norms)
        nonfinite = set()
        for index, norm in self._after.items():
            if math.isfinite(norm):
                continue
            # The norm of finite elements can overflow, and then it still does at the update.
            still_infinite = math.isinf(norm) and not math.isfinite(norms.get(index, math.inf))
            if index in self.now or not still_infinite:
                nonfinite.add(index)
        return frozenset(nonfinite)

    @cached_property
    def repaired(self) -> frozenset[int]:
        return self.before.intersection(self.indices).difference(self.now)

    def concerns(self, indices: Iterable[int]) -> bool:
        """Return whether one of some gradients is non-finite."""
        return not self.now.keys().isdisjoint(indices)

    def _is_guilty(self) -> bool | None:
        """Return whether this rank put NaN or Inf into an average, ``None`` if no average was non-finite."""
        # The first pass that averaged a non-finite gradient decides: later passes add to gradients that are non-finite already.
        # A rank that did not use its part of the model contributed nothing, and got these gradients from other ranks.
        for snapshot in self.snapshots:
            norms = as_dict(snapshot.norms)
            own_norms = snapshot.done.seen.contributed
            is_guilty: bool | None = None
            for index in self.before.union(self.now) & snapshot.averaged:
                if not math.isfinite(norms.get(index, 0.0)):
                    is_own = index in own_norms and not own_norms[index].isfinite()
                    is_guilty = bool(is_guilty or is_own)
            if is_guilty is not None:
                return is_guilty
        return None

    def report(self, names: Sequence[str], why: str = "") -> TrapReport:
        """Return a report on the border after the first pass that shows one, else at the update."""
        report = self._report_after_pass(names) or self._report_at_update(names)
        bad_now = tuple(names[index] for index in self.now)
        guilty = self._is_guilty()
        hint = _ELSEWHERE if guilty is False else report.hint
        return replace(report, head=why + report.head, bad=bad_now, guilty=guilty, hint=hint)

    def _report_after_pass(self, names: Sequence[str]) -> TrapReport | None:
        """Return a report on the first pass that left a non-finite gradient, ``None`` if no pass did."""
        passes = len(self.snapshots)
        for number, snapshot in enumerate(self.snapshots, 1):
            nonfinite = self._nonfinite(snapshot)
            if not nonfinite:
                continue
            moment = "after backward"
            if passes > 1:
                moment += f", micro-batch {number} of {passes}"
            # Some tensors keep a gradient from an earlier pass and received none in this pass.
            order = (*snapshot.order, *snapshot.indices)
            norms = self._whole_norms(snapshot.norms)
            report = gradient_report(names, moment, order, nonfinite, norms)
            return replace(report, hint=_AVERAGED) if self.averaged else report
        return None

    def _report_at_update(self, names: Sequence[str]) -> TrapReport:
        moment = "right before the update"
        order = tuple(self.indices)
        was_finite = bool(self.snapshots)
        if was_finite:
            moment += ", and finite after backward: something in between did it"
            order = (*self.snapshots[-1].order, *order)
        norms = self._whole_norms(self.norms)
        return gradient_report(names, moment, order, self.now, norms, edited=was_finite)

    def _whole_norms(self, norms: Norms) -> dict[int, float]:
        """Return norms without those of parts: the norm of a part is not the norm of the whole."""
        by_index = as_dict(norms)
        return {index: norm for index, norm in by_index.items() if index not in self.divided}

    def _nonfinite(self, snapshot: GradientSnapshot) -> dict[int, NonfiniteCount]:
        known: Mapping[int, NonfiniteCount] = {}
        # The counts at the update hold for the pass only if the script has not clipped since. NaN does not equal NaN.
        if repr(self._after) == repr(as_dict(self.norms)):
            known = self.now
        nonfinite = {}
        for index, norm in as_dict(snapshot.norms).items():
            if index in self.before and not math.isfinite(norm):
                nonfinite[index] = known.get(index, uncounted(norm))
        return nonfinite


def uncounted(norm: float) -> NonfiniteCount:
    """Return the kind of a gradient with a non-finite norm, without a count."""
    kind = "NaN" if math.isnan(norm) else "Inf"
    return NonfiniteCount(kind, 0)


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
    rows = []
    for index in order:
        kind = ""
        note = ""
        if index in bad:
            kind = bad[index].kind
            if bad[index].number:
                note = count(bad[index].number, "element")
        elif index in norms:
            note = f"norm {norms[index]:.3g}"
        rows.append((kind, printable(names[index]), note))
    first = _first_marked(rows)
    label = rows[first][1]
    lines = _table("in the order in which backward produced them:", "finite", rows)
    hint = ""
    if edited:
        lines.append(_EDITED)
    elif first > 0:
        lines.append(
            f"the border lies between {rows[first - 1][1]} (still finite) and {label} (first that is not)"
        )
    else:
        # Any NaN of the forward pass reaches the loss, and so every gradient.
        hint = (
            f"{label}, the first one that backward reached, is non-finite already: look at the loss, at the "
            "operations after this layer in the forward pass, and at inputs and weights"
        )
    head = f"{len(bad)} of {len(order)} gradients are not finite {moment}"
    return TrapReport(names[order[first]], head, lines, hint=hint)


def threshold_report(
    stat: str, names: Sequence[str], values: Sequence[float], tripped: Sequence[bool]
) -> TrapReport:
    rows = []
    for name, value, is_refused in zip(names, values, tripped, strict=True):
        word = "refused" if is_refused else ""
        rows.append((word, printable(name), f"{stat} {value:.3g}"))
    head = f"{sum(tripped)} of {len(names)} gradients are refused for their {stat}"
    lines = _table("in the order of the model:", "let pass", rows)
    return TrapReport(names[tripped.index(True)], head, lines, goes_on=GOES_ON, reduced=False)


def spelled(nonfinite: int) -> str:
    if nonfinite == UNCOUNTED:
        return "uncounted"
    return f"{nonfinite:,}"


def activation_report(flags: Sequence[tuple[Flag, int]]) -> TrapReport | None:
    """Return a report if a tensor has non-finite elements, given their number."""
    rows = []
    modules = []
    for flag, nonfinite in flags:
        word = ""
        note = ""
        if nonfinite:
            word = "non-finite"
            note = f"{spelled(nonfinite)} elements"
            modules.append(flag.name)
        rows.append((word, f"the {flag.what} of {printable(flag.name)}", note))
    if not modules:
        return None
    lines = _table("in the order in which they came:", "finite", rows)
    lines.append(f"the first non-finite one is {rows[_first_marked(rows)][1]}")
    head = f"{len(modules)} of {len(flags)} tensors are not finite"
    return TrapReport(modules[0], head, lines, reduced=False, modules=tuple(modules))


# A word that marks it, empty if it is fine; a label and a note.
_Row = tuple[str, str, str]


def _first_marked(rows: Sequence[_Row]) -> int:
    return next(place for place, (word, _, _) in enumerate(rows) if word)


def _table(title: str, fine: str, rows: Sequence[_Row]) -> list[str]:
    """Return a title and aligned rows around the first marked one, with counts of the rows that are left out."""
    start = max(0, min(_first_marked(rows) - _SHOWN // 2, len(rows) - _SHOWN))
    cells = []
    for word, label, note in rows[start : start + _SHOWN]:
        marked = f"> {word}" if word else f"  {fine}"
        cells.append((marked, label, note))
    lines = [title]
    if start:
        lines.append(f"    ... {start} more before")
    lines += grid(cells)
    after = len(rows) - start - _SHOWN
    if after > 0:
        lines.append(f"    ... {after} more after")
    return lines
