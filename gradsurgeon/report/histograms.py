"""Histograms of the elements of tensors: the quantiles of their magnitudes over the steps. Needs numpy."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gradsurgeon.records.store import Part
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.tables import by_statistic, together
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.tensors.statistics import (
    HISTOGRAM,
    HISTOGRAM_BINS,
    HISTOGRAM_LOWEST,
    HISTOGRAM_OCTAVES,
)

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MOST_STEPS = 500


def quantiles_of(counts: Any) -> Floats:
    """Return the magnitudes below which these `SHARES` of the elements lie, given counts of shape ``[..., 66]``.

    Zeros and non-finite elements do not count. The result is NaN if there are no others.
    """
    negative = counts[..., HISTOGRAM_BINS - 1 :: -1]
    numbers = negative + counts[..., HISTOGRAM_BINS : 2 * HISTOGRAM_BINS]
    sums = numbers.cumsum(axis=-1)
    quantiles = []
    for share in SHARES:
        wanted = share * sums[..., -1:]
        place = (sums >= wanted).argmax(axis=-1, keepdims=True)
        number = np.take_along_axis(numbers, place, axis=-1)
        more = np.take_along_axis(sums, place, axis=-1) - wanted
        # Within a bin the logarithms count as evenly spread.
        with np.errstate(invalid="ignore"):
            bins = place + 1 - more / number
        magnitudes = np.exp2(HISTOGRAM_LOWEST + HISTOGRAM_OCTAVES * bins)
        quantiles.append(magnitudes[..., 0])
    return np.array(quantiles)


def magnitudes_of(series: Iterable[Part]) -> Iterator[tuple[str, str, Ints, Floats]]:
    """Yield rule, name, steps and quantiles, in the order of `SHARES`, of each tensor that has histograms."""
    shown = []
    for part, repeated in of_lowest_ranks(series):
        if part.key.stat in HISTOGRAM and len(part) and not repeated:
            shown.append(part)
    for (_, rule, _, names), parts in by_statistic(shown).items():
        every = -(-len(parts[HISTOGRAM[0]]) // _MOST_STEPS)
        steps, counts, present = together(parts, every)
        in_order = [counts[stat] for stat in HISTOGRAM]
        quantiles = quantiles_of(np.stack(in_order, axis=-1).astype(float))
        for column, name in enumerate(names):
            known = present[:, column]
            yield rule, name, steps[known], quantiles[:, known, column]
