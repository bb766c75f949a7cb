"""The reports of traps: non-finite tensors with their evidence, refused statistics, and spikes with their beginning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count, grid
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.measure import UNCOUNTED, NonfiniteCount

GOES_ON = "the update goes on (`then: warn`)"
_SHOWN = 12
_EDITED = "all were finite after backward: look at how the script changes gradients afterwards (a clip, an edit of `.grad`)"
_OF_OTHERS = (
    "they were finite on this rank before ranks averaged them: look at the reports of other ranks"
)


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
    # The hint says where to look if no diagnosis says more.
    hint: str = ""

    def caused_by(self, ranks: tuple[int, ...]) -> TrapReport:
        """Return the report with the ranks that contributed NaN or Inf, if they are known."""
        is_known = bool(ranks) or self.guilty is False
        if not self.reduced or not is_known:
            return self
        # Later trips show their head alone.
        cause = _OF_OTHERS
        if ranks:
            cause = f"{_dist.named(ranks)} contributed NaN or Inf"
        return replace(self, head=f"{self.head}; {cause}", ranks=ranks)


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
