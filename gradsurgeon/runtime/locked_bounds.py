"""Warns when a running bound can no longer catch up with the norms: it cuts every update.

Both kinds of bound learn only from the norms that they let through. A bound whose variance reached 0 lets no other
norm through. A bound that started at a tiny norm grows by 0.1% per update. The papers do not mention this.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsurgeon.errors import printable
from gradsurgeon.runtime.running_norms import JudgedNorms, NormsOnHost, RunningStatistic

# With the options of the papers, healthy series also have long rows. For `times`, the longest row in 2,000 updates
# has a median length of 98. But there the bound follows the norms, or is close to the least of them.
_LONG = 100
LOOK_EVERY = 50
# A bound that needs more further updates than this will not catch up in time.
_FAR = 1000
# If the slack of a bound is more than this many times the usual norm, the bound does not limit the norms.
_SLACK = 10
_HINTS = {
    "sigmas": "raise `sigmas` or lower `beta`",
    "times": "raise `times` or lower `beta`",
}


@dataclass(slots=True)
class _Row:
    """Consecutive updates whose norm was above the bound.

    Attributes:
        length: the number of updates.
        least: the least of their norms.
        bound: the bound at the last check.
    """

    length: int = 0
    least: float = math.inf
    bound: float = math.nan


class LockedBounds:
    """Counts, for each bound, the consecutive updates above it."""

    def __init__(self) -> None:
        self._rows: defaultdict[RunningStatistic, dict[int, _Row]] = defaultdict(dict)

    def follow(
        self, names: Sequence[str], judged: JudgedNorms, known: NormsOnHost
    ) -> Iterator[str]:
        """Add the norms of an update; yield a message for each bound that can no longer catch up."""
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
                way = (
                    f"catches up in {missing:,.0f} updates"
                    if missing < math.inf
                    else "does not rise"
                )
                yield (
                    f"the norm{of} was above the bound in the last {row.length} updates: the least of these norms is "
                    f"{row.least:.3g}, the bound is now {row.bound:.3g} and {way}. The bound learns only from norms that "
                    f"it lets through: {_HINTS[judged.spikes.bound.name]}, or restart the bound in a new session"
                )

    def end(self, judged: JudgedNorms) -> None:
        """Add an update in which no norm was above its bound."""
        if rows := self._rows.get(judged.statistic):
            for owner in rows.keys() & set(_owners(judged)):
                del rows[owner]


def _owners(judged: JudgedNorms) -> Sequence[int]:
    """Return one tensor for each norm: for a single norm over all tensors, the first tensor."""
    return judged.statistic.tensors[:1] if judged.spikes.over_rule else judged.tensors


def _missing(earlier: float, row: _Row) -> float:
    """Return how many more updates a bound needs to reach the least norm, at the pace of the last updates."""
    if row.least <= row.bound:
        return 0.0
    if not 0 < earlier < row.bound:
        return math.inf
    return LOOK_EVERY * math.log(row.least / row.bound) / math.log(row.bound / earlier)


def told_of_size(
    names: Sequence[str], judged: JudgedNorms, numbers: Sequence[float], means: Sequence[float]
) -> str:
    """Return a message on norms that are too small for their bound, "" if there are none.

    ``numbers`` and ``means`` describe the norms that entered the running statistic of each bound.
    """
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
        f"the usual norm{of} is {mean:.3g}{more}: only a norm {bound.slack:.3g} above it is a spike, because ZClip adds "
        "this slack to avoid dividing by a deviation of 0; use `times`"
    )
