"""What was recorded of losses: their values, how far they conflict, and their weights in a combination. Needs numpy."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gradsurgeon.common._grouping import grouped
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.layout import json_number
from gradsurgeon.records.store.memory import LOSS, RATE
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.rules_and_events import COSINE, DISTANCE, LOSS_STATS, RATIO, WEIGHT
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.report.tables import Table

_MOST_TAGGED = 8
_ROWS = 28
# A loss is one number, of which they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf", LOSS)
_NUMBERS = ("mean", "least", "largest", "last")
# The columns of a table: a learning rate is finite, and no cosine.
_HEADS = {
    RATE: ("group", "history", "least", "largest", "last"),
    COSINE: ("loss", "history", *_NUMBERS, "< 0", "non-finite"),
}
_HEAD = ("loss", "history", *_NUMBERS, "non-finite")
# JSON and the page have at most so many points of a curve.
_MOST_POINTS = 2000
TITLES = {
    LOSS: "loss of each update",
    RATE: "learning rates",
    COSINE: "cosine of pairs of losses",
    RATIO: "ratio of the gradients of pairs of losses",
    WEIGHT: "weight of losses",
    DISTANCE: "distance of the combined gradient from the plain sum, over its norm",
}


class LossSeries(NamedTuple):
    """What one rule has measured of a loss or of a pair of losses, oldest first; a step may have several values."""

    rule: str
    stat: str
    name: str  # `seg`, `seg/depth`, or `trunk.0.weight:seg/depth` of a part
    steps: Ints
    values: Floats  # NaN where a loss gave no gradient

    @property
    def finite(self) -> Floats:
        return self.values[np.isfinite(self.values)]

    @property
    def numbers(self) -> dict[str, float]:
        finite = self.finite
        if not len(finite):
            finite = np.array([np.nan])
        return {
            "first": float(self.values[0]),
            "least": float(finite.min()),
            "median": float(np.median(finite)),
            "mean": float(finite.mean()),
            "largest": float(finite.max()),
            "last": float(self.values[-1]),
            "negative": float((finite < 0).mean()),
        }


def losses_of(series: Sequence[Part], params: Collection[str]) -> list[LossSeries]:
    """Return what was recorded of losses: values that the script has tagged, then conflicts and weights.

    Each rank has values of its own, as ranks have other batches. Names of parameters are no losses.
    """
    recorded = list(_tagged(series, params))
    # An update over its weight is a ratio, too.
    rules = set()
    for part in series:
        if part.key.stat in (COSINE, WEIGHT):
            rules.add(part.key.rule)
    for part, repeated in of_lowest_ranks(series):
        if part.key.rule not in rules or part.key.stat not in LOSS_STATS:
            continue
        names = [name for name, column in part.columns.items() if column not in repeated]
        recorded += _series_of(part, names)
    return _joined(recorded)


def rates_of(series: Iterable[Part], last: int) -> list[LossSeries]:
    """Return the learning rates of the lowest rank up to the last step; a point has the largest rate of a few steps."""
    rates = []
    for rate in rate_changes(series):
        steps = np.arange(rate.steps[0], last + 1)
        values = rate.values[np.searchsorted(rate.steps, steps, side="right") - 1]
        starts = np.arange(0, len(steps), -(-len(steps) // _MOST_POINTS))
        highest = np.maximum.reduceat(values, starts)
        highest[-1] = values[-1]
        rates.append(rate._replace(steps=steps[starts], values=highest))
    return rates


def rate_changes(series: Iterable[Part]) -> list[LossSeries]:
    """Return the learning rates of the lowest rank as they were recorded, when they changed."""
    recorded: list[LossSeries] = []
    for part, repeated in of_lowest_ranks(series):
        if part.key.stat == RATE and not repeated:
            recorded += _series_of(part, part.key.names)
    return _joined(recorded)


def thinned(
    steps: Ints, values: Floats, *, lowest: bool = False
) -> tuple[list[int], list[float | str]]:
    """Return at most so many points of a curve, each the worst of a few: the first non-finite, or else the largest.

    With `lowest` it is the smallest value, as of a cosine.
    """
    # Several records of one step make one point.
    _, starts = np.unique(steps, return_index=True)
    starts = starts[:: max(1, -(-len(starts) // _MOST_POINTS))]
    points = np.searchsorted(starts, np.arange(len(steps)), side="right")
    calmness = values
    if not lowest:
        calmness = -values
    calmness = np.where(np.isfinite(values), calmness, -np.inf)
    worst = np.lexsort([calmness, points])[starts]
    shown = [json_number(float(f"{value:.6g}")) for value in values[worst]]
    return steps[worst].tolist(), shown


def _joined(recorded: Iterable[LossSeries]) -> list[LossSeries]:
    """Return series with the parts of each name in one: other parameters beside it make another part."""
    series = []
    for parts in grouped(recorded, attrgetter("rule", "stat", "name")).values():
        steps = np.concatenate([part.steps for part in parts])
        values = np.concatenate([part.values for part in parts])
        order = np.argsort(steps, kind="stable")
        series.append(parts[0]._replace(steps=steps[order], values=values[order]))
    return series


def _tagged(series: Iterable[Part], params: Collection[str]) -> Iterator[LossSeries]:
    """Yield the values of tagged losses, each by its best statistic."""
    best: dict[tuple[int, str], Part] = {}
    for stat in _STATS:
        for part in series:
            if part.key.stat != stat:
                continue
            for name in part.key.names:
                if stat == LOSS or (name not in params and "loss" in name.lower()):
                    best.setdefault((part.rank, name), part)
    ranks = {rank for rank, _ in best}
    for rank, name in list(best)[:_MOST_TAGGED]:
        for loss in _series_of(best[rank, name], [name]):
            if len(ranks) > 1:
                yield loss._replace(name=f"{name}, rank {rank}")
            else:
                yield loss


def _series_of(part: Part, names: Sequence[str]) -> Iterator[LossSeries]:
    """Yield the values of some names, without rows that have none."""
    parts = list(blocks(part))
    if not parts:
        return
    all_steps, all_values, all_present = zip(*parts, strict=True)
    steps = np.concatenate(all_steps)
    values = np.concatenate(all_values)
    present = np.concatenate(all_present)
    for name in names:
        column = part.columns[name]
        has_value = present[:, column]
        if has_value.any():
            of_name = values[has_value, column].astype(float)
            yield LossSeries(part.key.rule, part.key.stat, name, steps[has_value], of_name)


def loss_tables(losses: Sequence[LossSeries]) -> Iterator[tuple[Table, Sequence[LossSeries]]]:
    """Yield a table and the curves of each statistic that a rule has measured of losses."""
    for (_, stat), series in grouped(losses, attrgetter("rule", "stat")).items():
        if stat == COSINE:
            # The worst conflicts come first, pairs without a number last.
            series.sort(key=lambda pair: np.nan_to_num(pair.numbers["mean"], nan=np.inf))
        yield _table(stat, series), series


def _cells(loss: LossSeries) -> dict[str, str]:
    """Return the text of each column of a table of losses."""
    numbers = loss.numbers
    nonfinite = len(loss.values) - len(loss.finite)
    cells = {"loss": printable(loss.name), "group": printable(loss.name), "history": ""}
    cells["< 0"] = f"{100 * numbers['negative']:.0f}%"
    cells["non-finite"] = f"{nonfinite:,}" if nonfinite else "-"
    for column in _NUMBERS:
        cells[column] = f"{numbers[column]:.3g}"
    return cells


def _drawn(values: Floats, least: float, largest: float) -> Floats:
    """Return values that a log scale draws as a linear scale draws the given ones, if not all are above 0."""
    if least > 0:
        return values
    shares = (values - least) / (largest - least or 1.0)
    return np.where(np.isfinite(values), 10**shares, np.nan)


def _table(stat: str, series: Sequence[LossSeries]) -> Table:
    head = _HEADS.get(stat, _HEAD)
    curves = []
    rows = []
    for loss in series[:_ROWS]:
        curves.append(_drawn(loss.values, loss.numbers["least"], loss.numbers["largest"]))
        cells = _cells(loss)
        rows.append([cells[column] for column in head])
    notes = []
    if len(series) > _ROWS:
        notes.append(f"... and {len(series) - _ROWS:,} more")
    if stat == COSINE:
        conflicts = [pair for pair in series if pair.numbers["mean"] < 0]
        notes.append(f"{count(len(conflicts), 'pair')} of {len(series):,} conflict on average")
    steps = np.concatenate([each.steps for each in series])
    title = TITLES.get(stat, "losses")
    return Table(
        f"{title}, recorded by {printable(series[0].rule)} in steps {steps.min()}..{steps.max()}",
        head,
        rows,
        right=frozenset(range(2, len(head))),
        curves=curves,
        notes=notes,
    )
