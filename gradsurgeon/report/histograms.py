"""Histograms of the elements of tensors: the quantiles of their magnitudes, for the report and its pictures."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.memory import matching
from gradsurgeon.report.rules_and_events import GRADIENT
from gradsurgeon.report.tables import Table
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

_ROWS = 12
_HEAD = ("tensor", "step", "5%", "50%", "95%", "zeros", "non-finite")


def quantile(counts: Sequence[float], share: float) -> float:
    """Return the magnitude below which this share of the finite elements other than 0 lies, NaN if there are none."""
    negative = counts[HISTOGRAM_BINS - 1 :: -1]
    positive = counts[HISTOGRAM_BINS : 2 * HISTOGRAM_BINS]
    numbers = list(map(operator.add, negative, positive))
    wanted = share * sum(numbers)
    for place, number in enumerate(numbers):
        if number and wanted <= number:
            # Within a bin the logarithms count as evenly spread.
            octaves = HISTOGRAM_OCTAVES * (place + wanted / number)
            return math.exp2(HISTOGRAM_LOWEST + octaves)
        wanted -= number
    return math.nan


def histogram_tables(series: Sequence[Part], kinds: Mapping[str, str]) -> Iterator[Table]:
    """Yield a table for each rule with histograms: the last one of each tensor."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for part in series:
        if part.key.stat == HISTOGRAM[0]:
            of_rule = names.setdefault((part.key.rule, part.key.point), {})
            of_rule |= dict.fromkeys(part.key.names)
    for (rule, point), of_rule in names.items():
        rows = [_row(series, rule, name) for name in list(of_rule)[:_ROWS]]
        noun = count(len(of_rule), kinds.get(rule, GRADIENT))
        title = f"magnitudes of elements other than 0 of {noun}, recorded by {printable(rule)} (at {point})"
        notes = []
        if len(of_rule) > _ROWS:
            notes.append(f"and {len(of_rule) - _ROWS:,} more")
        right = frozenset(range(1, len(_HEAD)))
        yield Table(title, _HEAD, [row for row in rows if row], right, notes=notes)


def _row(series: Sequence[Part], rule: str, name: str) -> list[str]:
    """Return the cells of the last histogram of a tensor, nothing before its first."""
    counts = []
    step = 0
    for column in HISTOGRAM:
        last = None
        for part in matching(series, name, column, rule):
            last = part.last(name) or last
        if last is None:
            return []
        step, number = last
        counts.append(number)
    *_, zeros, nonfinite = counts
    row = [printable(name), str(step)]
    row += [f"{quantile(counts, share):.2g}" for share in (0.05, 0.5, 0.95)]
    return [*row, f"{zeros / max(1, sum(counts)):.0%}", f"{nonfinite:,.0f}"]
