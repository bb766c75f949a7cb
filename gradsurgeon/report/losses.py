"""What was recorded of losses: their values, how far they conflict, and their weights in a combination. Needs numpy."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.rules_and_events import COSINE, DISTANCE, LOSS_STATS, RATIO, WEIGHT
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.report.tables import Table

_MOST_TAGGED, _ROWS = 8, 28
# A loss is one number, of which they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf")
_TAGGED_HEAD = ("loss", "history", "first", "least", "max", "last", "non-finite")
_PAIR_HEAD = ("losses", "mean cosine", "least", "< 0", "ratio", "calls")
_WEIGHT_HEAD = ("loss", "mean weight", "least", "largest", "calls")


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
) -> list[LossSeries]:
    """Return what was recorded of losses: values that the script has tagged, then conflicts and weights.

    Each rank has values of its own, as ranks have other batches. Names of parameters are no losses.
    """
    recorded = list(_tagged(of_all_ranks, params))
    of_losses = [(part, repeated) for part, repeated in series if part.key.stat in LOSS_STATS]
    # An update over its weight is a ratio, too.
    rules = {part.key.rule for part, _ in of_losses if part.key.stat in (COSINE, WEIGHT)}
    for part, repeated in of_losses:
        if part.key.rule in rules:
            columns = part.columns.items()
            names = [name for name, column in columns if column not in repeated]
            recorded += _series_of(part, names)
    # A set of parameters that grows, or another one of modules, is another series.
    joint: dict[tuple[str, str, str], list[LossSeries]] = {}
    for one in recorded:
        joint.setdefault((one.rule, one.stat, one.name), []).append(one)
    return [_joined(parts) for parts in joint.values()]


def _joined(parts: Sequence[LossSeries]) -> LossSeries:
    steps = np.concatenate([part.steps for part in parts])
    values = np.concatenate([part.values for part in parts])
    order = np.argsort(steps, kind="stable")
    return parts[0]._replace(steps=steps[order], values=values[order])


def _tagged(series: Iterable[Part], params: Collection[str]) -> Iterator[LossSeries]:
    measured = [part for part in series if part.key.stat in _STATS]
    measured.sort(key=lambda part: _STATS.index(part.key.stat))
    best: dict[tuple[int, str], Part] = {}
    for part in measured:
        for name in part.key.names:
            if name not in params and "loss" in name.lower():
                best.setdefault((part.rank, name), part)
    ranks = {rank for rank, _ in best}
    for (rank, name), part in list(best.items())[:_MOST_TAGGED]:
        for loss in _series_of(part, [name]):
            yield loss._replace(name=f"{name}, rank {rank}") if len(ranks) > 1 else loss


def _series_of(part: Part, names: Sequence[str]) -> Iterator[LossSeries]:
    read = list(blocks(part))
    if not read:
        return
    steps, numbers, present = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    for name in names:
        column = part.columns[name]
        there = present[:, column]
        if there.any():
            values = numbers[there, column].astype(float)
            yield LossSeries(part.key.rule, part.key.stat, name, steps[there], values)


def tagged_table(losses: Sequence[LossSeries]) -> Table:
    rows = []
    curves: list[list[float]] = []
    for loss in losses:
        numbers = loss.numbers
        cells = [f"{numbers[field]:.3g}" for field in ("first", "least", "largest", "last")]
        nonfinite = len(loss.values) - len(loss.finite)
        rows.append([printable(loss.name), "", *cells, f"{nonfinite:,}" if nonfinite else "-"])
        # A log scale has no place for 0 and less.
        curves.append(loss.values.tolist() if numbers["least"] > 0 else [])
    rules = dict.fromkeys(printable(loss.rule) for loss in losses)
    return Table(
        f"losses, recorded by {', '.join(rules)} in {_steps(losses)}",
        _TAGGED_HEAD,
        rows,
        right=frozenset(range(2, len(_TAGGED_HEAD))),
        curves=curves,
        levels=["bad" if len(loss.finite) < len(loss.values) else "" for loss in losses],
    )


def loss_tables(
    losses: Sequence[LossSeries], *, observed: bool
) -> Iterator[tuple[Table, dict[str, list[LossSeries]]]]:
    """Yield a table and the curves of each rule that compares or combines losses; notes say what stands out."""
    by_rule: dict[str, dict[str, list[LossSeries]]] = {}
    for one in losses:
        if one.stat in LOSS_STATS:
            by_rule.setdefault(one.rule, {}).setdefault(one.stat, []).append(one)
    for by_stat in by_rule.values():
        if cosines := by_stat.get(COSINE):
            # The worst conflicts come first, pairs without a number last.
            means = {one.name: one.numbers["mean"] for one in cosines}
            cosines.sort(
                key=lambda one: math.inf if math.isnan(means[one.name]) else means[one.name]
            )
            yield _pairs(cosines, by_stat.get(RATIO, [])), {"cosine": cosines}
        if weights := by_stat.get(WEIGHT):
            distances = by_stat.get(DISTANCE, [])
            charts = {"weight": weights, "distance from the plain sum, over its norm": distances}
            yield _weights(weights, distances, observed=observed), charts


def _pairs(worst: Sequence[LossSeries], ratios: Sequence[LossSeries]) -> Table:
    median_ratios = {ratio.name: ratio.numbers["median"] for ratio in ratios}
    rows = []
    conflicts = 0
    for pair in worst:
        numbers = pair.numbers
        conflicts += numbers["mean"] < 0
        rows.append(
            [
                printable(pair.name),
                _number(numbers["mean"]),
                _number(numbers["least"]),
                _share(numbers["negative"]),
                _number(median_ratios.get(pair.name, math.nan)),
                f"{len(pair.finite):,}",
            ]
        )
    notes = [f"{count(conflicts, 'pair')} of {len(worst):,} conflict on average"]
    if missing := sum(len(pair.values) - len(pair.finite) for pair in worst):
        notes.append(
            f"left out: {missing:,} times a loss of a pair gave no gradient, or none that is finite"
        )
    title = f"conflicts of {count(len(worst), 'pair')} of losses"
    table = _table(title, worst, _PAIR_HEAD, rows, notes)
    # The worst pairs are the first.
    return table._replace(levels=["warning"] * min(conflicts, _ROWS))


def _weights(
    weights: Sequence[LossSeries], distances: Sequence[LossSeries], *, observed: bool
) -> Table:
    rows = []
    for weight in weights:
        cells = [_number(weight.numbers[field]) for field in ("mean", "least", "largest")]
        rows.append([printable(weight.name), *cells, f"{len(weight.values):,}"])
    changed = "would have changed" if observed else "changed"
    notes = []
    for distance in distances:
        share = _share(float((distance.values > 0).mean()))
        step = distance.steps[distance.values.argmax()]
        notes.append(
            f"{changed} the sum in {share} of calls; distance from it, over its norm: mean "
            f"{_number(distance.numbers['mean'])}, largest {distance.values.max():.3g} at step {step}"
        )
    return _table("combined gradients of losses", weights, _WEIGHT_HEAD, rows, notes)


def _table(
    title: str,
    losses: Sequence[LossSeries],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> Table:
    if len(rows) > _ROWS:
        notes = [f"and {len(rows) - _ROWS:,} more", *notes]
    title += f", recorded by {printable(losses[0].rule)} in {_steps(losses)}"
    return Table(title, head, rows[:_ROWS], frozenset(range(1, len(head))), notes=notes)


def _steps(losses: Sequence[LossSeries]) -> str:
    first = min(loss.steps[0] for loss in losses)
    last = max(loss.steps[-1] for loss in losses)
    return f"steps {first}..{last}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"
