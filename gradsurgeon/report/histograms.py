"""Histograms of elements over the steps: the quantiles of their magnitudes. Needs numpy."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.tables import arrays, blocks
from gradsurgeon.report.rules_and_events import GRADIENT
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.report.tables import Table
from gradsurgeon.report.track import RecordOrigin
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

_ROWS = 12
_HEAD = ("tensor", "5%", "50%", "95%", "50% at first", "< 0", "zeros", "non-finite")
_LISTED = (0.05, 0.5, 0.95)


class Histogram(NamedTuple):
    """The counts of the elements of one tensor, a row of 66 for each record."""

    name: str
    origin: RecordOrigin
    steps: Ints
    counts: Floats

    def quantiles(self, share: float) -> Floats:
        """Return the magnitude below which this share of the finite elements other than 0 lies, NaN if there are none."""
        bins = self.counts[:, : 2 * HISTOGRAM_BINS]
        magnitudes = bins[:, HISTOGRAM_BINS:] + bins[:, HISTOGRAM_BINS - 1 :: -1]
        totals = np.cumsum(magnitudes, axis=1)
        wanted = share * totals[:, -1:]
        places = np.minimum((totals < wanted).sum(axis=1), HISTOGRAM_BINS - 1)
        rows = np.arange(len(places))
        inside = magnitudes[rows, places]
        below = totals[rows, places] - inside
        with np.errstate(all="ignore"):
            # Within a bin the logarithms count as evenly spread; 0 / 0 of no elements is NaN.
            part = (wanted[:, 0] - below) / inside
        quantiles: Floats = np.exp2(HISTOGRAM_LOWEST + HISTOGRAM_OCTAVES * (places + part))
        return quantiles

    @property
    def negative(self) -> Floats:
        """The share of negative elements in each record."""
        return self._share(self.counts[:, :HISTOGRAM_BINS].sum(axis=1))

    @property
    def zeros(self) -> Floats:
        """The share of elements that are 0 in each record."""
        return self._share(self.counts[:, -2])

    @property
    def nonfinite(self) -> Floats:
        """The number of non-finite elements in each record."""
        return self.counts[:, -1]

    def _share(self, numbers: Floats) -> Floats:
        shares: Floats = numbers / np.maximum(self.counts.sum(axis=1), 1)
        return shares


def histograms_of(
    series: Iterable[Part], kinds: Mapping[str, str], *, names: Collection[str] | None = None
) -> list[Histogram]:
    """Return the histograms of a run: all records of some tensors, or the first and the last record of each."""
    groups: dict[tuple[object, ...], dict[str, Part]] = {}
    for part, repeated in of_lowest_ranks(series):
        if part.key.stat in HISTOGRAM and len(repeated) < len(part.key.names):
            group = groups.setdefault((part.rank, part.key._replace(stat="")), {})
            group[part.key.stat] = part
    histograms: dict[tuple[RecordOrigin, str], Histogram] = {}
    for group in groups.values():
        if len(group) < len(HISTOGRAM):
            continue  # a damaged file
        parts = [group[column] for column in HISTOGRAM]
        for histogram in _of_group(parts, kinds, names):
            place = histogram.origin, histogram.name
            if place in histograms:  # another optimizer has claimed the tensor
                histograms[place] = _joined(histograms[place], histogram)
            else:
                histograms[place] = histogram
    return list(histograms.values())


def _of_group(
    parts: list[Part], kinds: Mapping[str, str], names: Collection[str] | None
) -> Iterator[Histogram]:
    """Yield the histograms of the tensors of 66 series, one for each column of a histogram."""
    key = parts[0].key
    origin = RecordOrigin(kinds.get(key.rule, GRADIENT), key.rule, key.point)
    columns = [place for place, name in enumerate(key.names) if names is None or name in names]
    if not columns:
        return
    by_bin = []
    for part in parts:
        steps, values, present = _rows(part, ends_only=names is None)
        by_bin.append((steps, np.where(present, values, np.nan)[:, columns]))
    # A run that is being written may have a row more of some columns.
    length = min(len(steps) for steps, _ in by_bin)
    steps = by_bin[0][0][:length]
    counts = np.stack([values[:length] for _, values in by_bin], axis=2)
    for place, column in enumerate(columns):
        of_tensor = counts[:, place].astype(float)
        is_there = ~np.isnan(of_tensor).any(axis=1)
        if is_there.any():
            yield Histogram(key.names[column], origin, steps[is_there], of_tensor[is_there])


def _rows(part: Part, *, ends_only: bool) -> tuple[Any, Any, Any]:
    width = len(part.key.names)
    if ends_only:
        last = max(0, len(part) - 1)
        ends = [*part.stored(0, min(1, last)), *part.stored(last, last + 1)]
        return arrays(ends, width)
    steps, values, present = zip(*blocks(part), strict=True)
    return np.concatenate(steps), np.concatenate(values), np.concatenate(present)


def _joined(first: Histogram, second: Histogram) -> Histogram:
    steps = np.concatenate([first.steps, second.steps])
    counts = np.concatenate([first.counts, second.counts])
    order = np.argsort(steps, kind="stable")
    return first._replace(steps=steps[order], counts=counts[order])


def histogram_tables(histograms: Iterable[Histogram]) -> Iterator[Table]:
    """Yield a table for each rule: quantiles of the last histogram of each tensor."""
    by_origin: dict[RecordOrigin, list[Histogram]] = {}
    for histogram in histograms:
        by_origin.setdefault(histogram.origin, []).append(histogram)
    for origin, group in by_origin.items():
        last = max(int(histogram.steps[-1]) for histogram in group)
        where = f"{printable(origin.rule)} (at {printable(origin.point)})"
        noun = count(len(group), origin.kind)
        title = f"magnitudes of the elements of {noun} at step {last}, recorded by {where}"
        notes = ["quantiles of the finite elements other than 0"]
        if len(group) > _ROWS:
            notes.insert(0, f"and {len(group) - _ROWS:,} more: `histograms(NAME)` of the run")
        rows = [_row(histogram) for histogram in group[:_ROWS]]
        yield Table(title, _HEAD, rows, right=frozenset(range(1, len(_HEAD))), notes=notes)


def _row(histogram: Histogram) -> list[str]:
    row = [printable(histogram.name)]
    row += [_magnitude(histogram.quantiles(share)[-1]) for share in _LISTED]
    row.append(_magnitude(histogram.quantiles(0.5)[0]))
    row += [f"{shares[-1]:.0%}" for shares in (histogram.negative, histogram.zeros)]
    nonfinite = int(histogram.nonfinite[-1])
    row.append(f"{nonfinite:,}" if nonfinite else "-")
    return row


def _magnitude(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2g}"
