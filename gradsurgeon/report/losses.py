"""What was recorded of losses: their values, how far they conflict, and their weights in a combination. Needs numpy."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.history import MOST_VALUES
from gradsurgeon.report.rules_and_events import COSINE, DISTANCE, LOSS_STATS, RATIO, WEIGHT
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.report.tables import Table

_MOST_TAGGED, _ROWS = 8, 28
# A loss is one number, of which they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf")
_TAGGED_HEAD = ("loss", "history", "first", "least", "max", "last", "non-finite")
_PAIR_HEAD = ("losses", "mean cosine", "least", "< 0", "ratio", "calls")
_WEIGHT_HEAD = ("loss", "mean weight", "least", "largest", "calls")


class Measured(NamedTuple):
    """What one rule has measured of a loss or of a pair of losses, oldest first; a step may have several values."""

    rule: str
    stat: str
    name: str  # `seg`, `seg/depth`, or `trunk.0.weight:seg/depth` of a part
    steps: Ints
    values: Floats  # NaN where a loss gave no gradient
    every: int  # one row in so many was read

    @property
    def finite(self) -> Floats:
        return self.values[np.isfinite(self.values)]

    @property
    def numbers(self) -> dict[str, float]:
        known = self.finite if len(self.finite) else np.array([np.nan])
        return {
            "first": float(self.values[0]),
            "least": float(known.min()),
            "median": float(np.median(known)),
            "mean": float(known.mean()),
            "largest": float(known.max()),
            "last": float(self.values[-1]),
            "negative": float((known < 0).mean()),
        }


def losses_of(
    series: Iterable[tuple[Part, frozenset[int]]],
    of_all_ranks: Iterable[Part],
    params: Collection[str],
) -> list[Measured]:
    """Return what was recorded of losses: values that the script has tagged, then conflicts and weights.

    Each rank has values of its own, as ranks have other batches. Names of parameters are no losses.
    """
    found = list(_tagged(of_all_ranks, params))
    every = [(one, repeated) for one, repeated in series if one.key.stat in LOSS_STATS and len(one)]
    # An update over its weight is a ratio, too.
    rules = {one.key.rule for one, _ in every if one.key.stat in (COSINE, WEIGHT)}
    for one, repeated in every:
        if one.key.rule in rules:
            names = [name for name, column in one.columns.items() if column not in repeated]
            found += _curves(one, names)
    # A set of parameters that grows, or another one of modules, is another series.
    joint: dict[tuple[str, str, str], list[Measured]] = {}
    for curve in found:
        joint.setdefault((curve.rule, curve.stat, curve.name), []).append(curve)
    every_curve = []
    for parts in joint.values():
        steps = np.concatenate([part.steps for part in parts])
        order = np.argsort(steps, kind="stable")
        values = np.concatenate([part.values for part in parts])[order]
        every_curve.append(parts[0]._replace(steps=steps[order], values=values))
    return every_curve


def _tagged(series: Iterable[Part], params: Collection[str]) -> Iterator[Measured]:
    shown = [one for one in series if one.key.stat in _STATS and len(one)]
    best: dict[tuple[int, str], Part] = {}
    for one in sorted(shown, key=lambda one: _STATS.index(one.key.stat)):
        for name in one.key.names:
            if name not in params and "loss" in name.lower():
                best.setdefault((one.rank, name), one)
    several = len({rank for rank, _ in best}) > 1
    for (rank, name), one in [*best.items()][:_MOST_TAGGED]:
        for curve in _curves(one, [name]):
            yield curve._replace(name=f"{name}, rank {rank}") if several else curve


def _curves(series: Part, names: Sequence[str]) -> Iterator[Measured]:
    every = -(-len(series) * len(series.columns) // MOST_VALUES)
    read = [[np.copy(part[::every]) for part in block] for block in blocks(series, every=every)]
    steps, numbers, present = (np.concatenate(parts) for parts in zip(*read, strict=True))
    for name in names:
        column = series.columns[name]
        there = present[:, column].astype(bool)
        if there.any():
            values = numbers[there, column].astype(float)
            yield Measured(series.key.rule, series.key.stat, name, steps[there], values, every)


def tagged_table(found: Sequence[Measured]) -> Table:
    rows = []
    for one in found:
        cells = (f"{one.numbers[field]:.3g}" for field in ("first", "least", "largest", "last"))
        bad = len(one.values) - len(one.finite)
        rows.append([printable(one.name), "", *cells, f"{bad:,}" if bad else "-"])
    rules = dict.fromkeys(printable(one.rule) for one in found)
    return Table(
        f"losses, recorded by {', '.join(rules)} in {_steps(found)}",
        _TAGGED_HEAD,
        rows,
        right=frozenset(range(2, len(_TAGGED_HEAD))),
        # A log scale has no place for 0 and less.
        curves=[one.values.tolist() if one.numbers["least"] > 0 else [] for one in found],
        levels=["bad" if len(one.finite) < len(one.values) else "" for one in found],
        notes=_sampled(found),
    )


def loss_tables(
    found: Sequence[Measured], *, observed: bool
) -> Iterator[tuple[Table, dict[str, list[Measured]]]]:
    """Yield a table and the curves of each rule that compares or combines losses; notes say what stands out."""
    for rule in dict.fromkeys(one.rule for one in found if one.stat in LOSS_STATS):
        by_stat: dict[str, list[Measured]] = {}
        for one in found:
            if one.rule == rule:
                by_stat.setdefault(one.stat, []).append(one)
        if cosines := by_stat.get(COSINE):
            cosines.sort(key=lambda one: (math.isnan(mean := one.numbers["mean"]), mean))
            yield _pairs(cosines, by_stat), {"cosine": cosines}
        if weights := by_stat.get(WEIGHT):
            distances = by_stat.get(DISTANCE, [])
            charts = {"weight": weights, "distance from the plain sum, over its norm": distances}
            yield _weights(weights, distances, observed=observed), charts


def _pairs(worst: Sequence[Measured], by_stat: dict[str, list[Measured]]) -> Table:
    ratios = {one.name: one.numbers["median"] for one in by_stat.get(RATIO, ())}
    rows = []
    for one in worst[:_ROWS]:
        numbers, ratio = one.numbers, ratios.get(one.name, math.nan)
        cells = _number(numbers["mean"]), _number(numbers["least"]), _share(numbers["negative"])
        rows.append([printable(one.name), *cells, _number(ratio), f"{len(one.finite):,}"])
    low = sum(one.numbers["mean"] < 0 for one in worst)
    text = f"{count(low, 'pair')} of {len(worst):,} conflict on average"
    missing = sum(len(one.values) - len(one.finite) for one in worst)
    left_out = (
        f"left out: {missing:,} times a loss of a pair gave no gradient, or none that is finite"
    )
    title = f"conflicts of {count(len(worst), 'pair')} of losses"
    table = _table(title, worst, _PAIR_HEAD, rows, [text, *[left_out] * bool(missing)])
    conflicts = (one.numbers["mean"] < 0 for one in worst[:_ROWS])
    return table._replace(levels=["warning" if one else "" for one in conflicts])


def _weights(
    weights: Sequence[Measured], distances: Sequence[Measured], *, observed: bool
) -> Table:
    rows = []
    for one in weights[:_ROWS]:
        cells = (_number(one.numbers[field]) for field in ("mean", "least", "largest"))
        rows.append([printable(one.name), *cells, f"{len(one.values):,}"])
    notes = [
        f"{'would have ' * observed}changed the sum in {_share(float((one.values > 0).mean()))} of calls; distance from it, over its "
        f"norm: mean {_number(one.numbers['mean'])}, largest {one.values.max():.3g} at step {one.steps[one.values.argmax()]}"
        for one in distances
    ]
    return _table("combined gradients of losses", weights, _WEIGHT_HEAD, rows, notes)


def _table(
    title: str,
    found: Sequence[Measured],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> Table:
    more = [f"and {len(found) - _ROWS:,} more"] if len(found) > _ROWS else []
    title += f", recorded by {printable(found[0].rule)} in {_steps(found)}"
    return Table(
        title, head, rows, frozenset(range(1, len(head))), notes=[*more, *_sampled(found), *notes]
    )


def _sampled(found: Sequence[Measured]) -> list[str]:
    every = max(one.every for one in found)
    return [f"the run is long: one call in {every:,} was read"] if every > 1 else []


def _steps(found: Sequence[Measured]) -> str:
    return f"steps {min(one.steps[0] for one in found)}..{max(one.steps[-1] for one in found)}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"
