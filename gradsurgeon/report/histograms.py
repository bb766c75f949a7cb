"""Histograms of the elements of tensors: the quantiles of their magnitudes, for the report and its pictures."""

import math
import operator
from collections.abc import Iterator, Sequence

from gradsurgeon.errors import printable
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.memory import matching
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.report.tables import Table
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

_ROWS = 12
_QUANTILES = {"5%": 0.05, "50%": 0.5, "95%": 0.95}
_HEAD = ("tensor", "step", *_QUANTILES, "non-finite")
_NUMBERS = frozenset(range(1, len(_HEAD)))


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


def histogram_tables(series: Sequence[Part]) -> Iterator[Table]:
    """Yield a table for each rule with histograms: the last one of each tensor."""
    lowest = [part for part, repeated in of_lowest_ranks(series) if not repeated]
    names: dict[str, dict[str, None]] = {}
    for part in lowest:
        if part.key.stat == HISTOGRAM[0]:
            names.setdefault(part.key.rule, {}).update(dict.fromkeys(part.key.names))
    for rule, of_rule in names.items():
        shown = list(of_rule)[:_ROWS]
        title = f"magnitudes of elements other than 0, recorded by {printable(rule)}"
        notes = []
        if len(of_rule) > _ROWS:
            notes.append(f"and {len(of_rule) - _ROWS:,} more")
        rows = [_row(lowest, rule, name) for name in shown]
        yield Table(title, _HEAD, list(filter(None, rows)), _NUMBERS, notes=notes)


def _row(series: Sequence[Part], rule: str, name: str) -> list[str]:
    """Return the cells of a tensor, nothing before its first histogram."""
    lasts = [matching(series, name, column, rule)[-1].last(name) for column in HISTOGRAM]
    if None in lasts:
        return []
    steps, counts = zip(*filter(None, lasts), strict=True)
    row = [printable(name), str(steps[0])]
    row += [f"{quantile(counts, share):.2g}" for share in _QUANTILES.values()]
    return [*row, f"{counts[-1]:,.0f}"]
