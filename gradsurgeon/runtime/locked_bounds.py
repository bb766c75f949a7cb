"""Tells of running bounds that the norms have left for good: they cut every update, and cannot follow.

Both bounds learn from what they let through. One whose variance has come down to 0 lets nothing else through any
more, and one that has begun at a tiny norm grows by a thousandth in an update: the papers have no word on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsurgeon.errors import printable
from gradsurgeon.runtime.running_norms import JudgedNorms, NormsOnHost, RunningStatistic

# In healthy series, with the options of the papers, rows are long as well: the median of the longest of 2,000
# updates is 98 for `times`. But there the bound comes after the norms, or is close to the least of them.
_LONG = 100
LOOK_EVERY = 50
# A bound that needs so many more updates will not get there in time.
_FAR = 1000
# Norms of which the slack of a bound is so many times the usual are not bounded by it.
_SLACK = 10
_HINTS = {
    "sigmas": "raise `sigmas` or lower `beta`",
    "times": "raise `times` or lower `beta`",
}


@dataclass(slots=True)
class _Row:
    """Updates in a row whose norm was above the bound.

    Attributes:
        length: how many.
        least: the least of their norms.
        bound: what the bound was when it was looked at last.
    """

    length: int = 0
    least: float = math.inf
    bound: float = math.nan


class LockedBounds:
    """Counts, for each bound, the updates in a row that were above it."""

    def __init__(self) -> None:
        self._rows: defaultdict[RunningStatistic, dict[int, _Row]] = defaultdict(dict)

    def follow(
        self, names: Sequence[str], judged: JudgedNorms, known: NormsOnHost
    ) -> Iterator[str]:
        """Take in the norms of an update; yield what is to be said of a bound that cannot follow."""
        rows, owners = self._rows[judged.statistic], _owners(judged)
        cut = {owners[place]: place for place in known.cut}
        for owner in rows.keys() & set(owners) - cut.keys() if rows else ():
            del rows[owner]
        for owner, place in cut.items():
            row = rows.setdefault(owner, _Row())
            row.length, row.least = row.length + 1, min(row.least, known.norms[place])
            if row.length % LOOK_EVERY:
                continue
            bound = judged.spikes.bound.bounds(known.before[:, place].tolist())
            earlier, row.bound = row.bound, math.nan if bound is None else bound[0]
            if row.length >= _LONG and (missing := _missing(earlier, row)) > _FAR:
                of = "" if judged.spikes.over_rule else f" of {printable(names[owner])}"
                way = f"needs {missing:,.0f} more" if missing < math.inf else "does not rise"
                yield (
                    f"the norm{of} was above the bound in the last {row.length} updates; the bound is {row.bound:.3g} "
                    f"by now, and {way} to get to {row.least:.3g}, the least of these norms. What it lets through is all "
                    f"that it learns from: {_HINTS[judged.spikes.bound.name]}, or let it begin anew, as in a new session"
                )

    def end(self, judged: JudgedNorms) -> None:
        """Take in the norms of an update of which none was above its bound."""
        if rows := self._rows.get(judged.statistic):
            for owner in rows.keys() & set(_owners(judged)):
                del rows[owner]


def _owners(judged: JudgedNorms) -> Sequence[int]:
    """Return a tensor for each norm: where one is on all of them, the first of those it is on."""
    return judged.statistic.tensors[:1] if judged.spikes.over_rule else judged.tensors


def _missing(earlier: float, row: _Row) -> float:
    """Return how many more updates a bound needs to get to the least of the norms, at the pace of the last ones."""
    if row.least <= row.bound:
        return 0.0
    if not 0 < earlier < row.bound:
        return math.inf
    return LOOK_EVERY * math.log(row.least / row.bound) / math.log(row.bound / earlier)


def told_of_size(
    names: Sequence[str], judged: JudgedNorms, numbers: Sequence[float], means: Sequence[float]
) -> str:
    """Return what is to be said of norms that are too small for their bound, by what has entered of each; else nothing."""
    bound = judged.spikes.bound
    known = zip(_owners(judged), numbers, means, strict=True)
    small = [
        (owner, mean)
        for owner, number, mean in known
        if number >= LOOK_EVERY and 0 < mean * _SLACK < bound.slack
    ]
    if not small:
        return ""
    owner, mean = small[0]
    of = "" if judged.spikes.over_rule else f" of {printable(names[owner])}"
    more = f" (and {len(small) - 1} more)" if len(small) > 1 else ""
    return (
        f"the usual norm{of} is {mean:.3g}{more}: nothing is a spike that is not {bound.slack:.3g} above it, which ZClip "
        "has so that a deviation of 0 can be divided by; use `times`"
    )
