"""What was recorded of losses: values, how far they conflict, and their weights in a combination. Needs numpy.

Which rules have recorded that is told by their statistics, and between which losses by the names in their keys:
`seg/depth`, or `trunk.0.weight:seg/depth` of a part of what the rule matches.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradsurgeon.report.rules_and_events import (
    COSINE,
    DISTANCE,
    LOSS_STATS,
    RATIO,
    WEIGHT,
    RuleInfo,
)
from gradsurgeon.report.sheets import blocks
from gradsurgeon.store import WholeSeries

# So many values are read; of more one call in a few.
MOST_VALUES = 2 * 2**20
_MOST_TAGGED = 8
# A word of its own, be it by underscores, dots or capitals: `val_loss`, `lossKL`, `trainLoss`, but no `gloss`.
_LOSS = re.compile(
    r"((?<![A-Za-z])|(?<=[A-Z]))loss(es)?(?![a-z])|(?<![A-Z])Loss(es)?(?![a-z])|(?<![A-Za-z])LOSS(ES)?(?![A-Za-z])"
)
# A loss is one number, of which they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf")


class Curve(NamedTuple):
    """Steps and values of each call, oldest first; a step may have several."""

    steps: NDArray[np.int64]
    values: NDArray[np.floating[Any]]


_NONE = Curve(np.empty(0, np.int64), np.empty(0))


class Pair(NamedTuple):
    """How the gradients of two losses lay to each other, over all calls in which both had one.

    Attributes:
        part: over what they were compared, empty for all that the rule matches.
        first: the one loss.
        second: the other one.
        calls: how many calls there are.
        missing: in how many more a loss did not reach, or its gradient was not finite.
        cosine: the mean.
        least: the smallest cosine.
        below: the share of calls in which it was below 0.
        below_from: the first step in which it was, `None` if it never was.
        ratio: the geometric mean of the norm of the first over that of the second.
        curve: step and cosine of each call.
    """

    part: str
    first: str
    second: str
    calls: int
    missing: int
    cosine: float
    least: float
    below: float
    below_from: int | None
    ratio: float
    curve: Curve

    @property
    def name(self) -> str:
        return f"{self.first}/{self.second}"


class Compared(NamedTuple):
    """The pairs of losses that one rule has compared; one call in `every` was read."""

    rule: str
    losses: tuple[str, ...]
    pairs: Sequence[Pair]
    steps: tuple[int, int]
    every: int = 1

    def worst(self) -> list[Pair]:
        """Return the pairs, the lowest mean cosine first, and last those that were never compared."""
        return sorted(self.pairs, key=lambda one: (math.isnan(one.cosine), one.cosine))


class Weighed(NamedTuple):
    """The weights of one loss, as one rule has combined it."""

    name: str
    calls: int
    mean: float
    least: float
    largest: float
    curve: Curve


class Combined(NamedTuple):
    """What one rule that combines losses has made of their sum.

    Attributes:
        rule: its id.
        weights: of each loss.
        steps: the first and the last.
        calls: how many there are.
        changed: in which share of them something else than the sum came out.
        distance: of that from the sum, over the norm of the sum: the mean of what is finite.
        largest: the largest distance.
        largest_step: its step.
        curve: step and distance of each call.
        every: one call in so many was read.
    """

    rule: str
    weights: Sequence[Weighed]
    steps: tuple[int, int]
    calls: int
    changed: float
    distance: float
    largest: float
    largest_step: int
    curve: Curve
    every: int = 1


class OfLosses(NamedTuple):
    compared: Sequence[Compared] = ()
    combined: Sequence[Combined] = ()

    @property
    def stats(self) -> frozenset[str]:
        """The statistics that are shown."""
        return frozenset(
            (COSINE, RATIO) * bool(self.compared) + (WEIGHT, DISTANCE) * bool(self.combined)
        )


class Tagged(NamedTuple):
    """The values of a tensor that the script has tagged as a loss, on one rank, and the rule that recorded them."""

    name: str
    rule: str
    first: float
    least: float
    largest: float
    last: float
    nonfinite: int
    curve: Curve


def tagged_losses(
    series: Iterable[WholeSeries], params: Collection[str], newest: int | None = None
) -> Iterator[Tagged]:
    """Yield each tagged loss, on each rank, because ranks have other batches.

    Args:
        series: every series of the run.
        params: names that are parameters, and so no losses.
        newest: read only so many of the newest rows of each series.
    """
    found: dict[tuple[int, str], WholeSeries] = {}
    shown = [one for one in series if one.key.stat not in LOSS_STATS and len(one)]
    for one in sorted(shown, key=lambda one: [*_STATS, one.key.stat].index(one.key.stat)):
        for name in one.key.names:
            if name not in params and _LOSS.search(name):
                # A session has one rank.
                found.setdefault((getattr(one, "rank", 0), name), one)
    several = len({rank for rank, _ in found}) > 1
    for (rank, name), one in sorted(found.items(), key=lambda pair: pair[0][0])[:_MOST_TAGGED]:
        label = f"{name}, rank {rank}" if several else name
        steps, numbers, present = _read(one, newest)
        there = present[:, one.columns[name]]
        values = numbers[there, one.columns[name]].astype(float)
        finite = np.where(np.isfinite(values), values, np.nan)
        if len(values):
            yield Tagged(
                label,
                one.key.rule,
                first=float(values[0]),
                least=float(np.fmin.reduce(finite)),
                largest=float(np.fmax.reduce(finite)),
                last=float(values[-1]),
                nonfinite=int(np.isnan(finite).sum()),
                curve=Curve(steps[there], values),
            )


def _read(series: WholeSeries, newest: int | None, every: int = 1) -> list[NDArray[Any]]:
    """Return steps, values and which values are there, of one row in a few."""
    start = 0 if newest is None else max(0, len(series) - newest)
    read = [
        [np.copy(part[::every]) for part in block] for block in blocks(series, start, every=every)
    ]
    return [np.concatenate(parts) for parts in zip(*read, strict=True)]


def of_series(
    series: Iterable[tuple[WholeSeries, frozenset[int]]],
    rules: Mapping[str, RuleInfo],
    newest: int | None = None,
) -> OfLosses:
    """Return what was recorded of several losses, by rule in file order.

    Args:
        series: each series, with columns that another one has recorded as well.
        rules: every rule by id.
        newest: read only so many of the newest rows of each series.
    """
    shown = [pair for pair in series if pair[0].key.stat in LOSS_STATS and len(pair[0])]
    values = sum(min(len(one), newest or len(one)) * len(one.key.names) for one, _ in shown)
    every = max(1, -(-values // MOST_VALUES))
    # By rule, statistic and name. A set of parameters that grows, or another one of modules, is another series.
    found: dict[str, Any] = {rule: defaultdict(lambda: defaultdict(list)) for rule in rules}
    for one, repeated in shown:
        steps, numbers, present = _read(one, newest, every)
        by_stat = found.setdefault(one.key.rule, defaultdict(lambda: defaultdict(list)))
        for column, name in enumerate(one.key.names):
            there = present[:, column]
            if column not in repeated and there.any():
                curve = Curve(steps[there], numbers[there, column].astype(float))
                by_stat[one.key.stat][name].append(curve)
    compared, combined = [], []
    for rule, by_stat in found.items():
        curves = {
            stat: {name: _joined(some) for name, some in named.items()}
            for stat, named in by_stat.items()
        }
        losses = rules[rule].losses if rule in rules else ()
        if pairs := _pairs(curves, losses):
            compared.append(_compared(rule, pairs, losses, _joined(curves[COSINE].values()), every))
        # A statistic of somebody's own may have one of these names, hardly both.
        if WEIGHT in curves and DISTANCE in curves:
            combined.append(_combined(rule, curves, every))
    return OfLosses(compared, combined)


def _joined(curves: Iterable[Curve]) -> Curve:
    found = list(curves)
    steps = np.concatenate([curve.steps for curve in found])
    order = np.argsort(steps, kind="stable")
    return Curve(steps[order], np.concatenate([curve.values for curve in found])[order])


def _pairs(curves: Mapping[str, Mapping[str, Curve]], named: Collection[str]) -> list[Pair]:
    pairs = []
    for name, curve in curves.get(COSINE, {}).items():
        if (split := split_pair(name, named)) is None:
            continue
        known = ~np.isnan(curve.values)
        steps, cosines = curve.steps[known], curve.values[known]
        ratios = curves.get(RATIO, {}).get(name, _NONE).values
        pairs.append(
            Pair(
                *split,
                calls=len(steps),
                missing=len(curve.steps) - len(steps),
                cosine=_mean(cosines),
                least=float(cosines.min()) if len(steps) else math.nan,
                below=_mean(cosines < 0),
                below_from=int(steps[cosines < 0][0]) if (cosines < 0).any() else None,
                # A mean of ratios would not be as far from 2 as from 1/2.
                ratio=math.exp(_mean(np.log(ratios[ratios > 0]))),
                curve=Curve(steps, cosines),
            )
        )
    return pairs


def _compared(
    rule: str, pairs: list[Pair], named: Sequence[str], every_cosine: Curve, every: int
) -> Compared:
    found = dict.fromkeys(loss for pair in pairs for loss in (pair.first, pair.second))
    losses = tuple(dict.fromkeys((*(loss for loss in named if loss in found), *found)))
    steps = every_cosine.steps
    return Compared(rule, losses, pairs, (int(steps[0]), int(steps[-1])), every)


def _combined(rule: str, curves: Mapping[str, Mapping[str, Curve]], every: int) -> Combined:
    steps, distances = curve = _joined(curves[DISTANCE].values())
    top = int(np.argmax(distances))
    return Combined(
        rule,
        [
            Weighed(name, len(values), _mean(values), float(values.min()), float(values.max()), one)
            for name, one in curves[WEIGHT].items()
            for values in [one.values]
        ],
        steps=(int(steps[0]), int(steps[-1])),
        calls=len(steps),
        changed=float((distances > 0).mean()),
        distance=_mean(distances),
        largest=float(distances[top]),
        largest_step=int(steps[top]),
        curve=curve,
        every=every,
    )


def _mean(values: NDArray[Any]) -> float:
    """Return the mean of the finite values, NaN where there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def split_pair(name: str, losses: Collection[str]) -> tuple[str, str, str] | None:
    """Return the part and the two losses that a name such as ``trunk.0.weight:seg/depth`` is made of.

    Args:
        name: of a record.
        losses: those that the rule compares, as far as they are known: only they tell of a loss called
            ``train/seg`` where it ends.
    """
    part, _, pair = name.rpartition(":")
    words = pair.split("/")
    splits = [("/".join(words[:at]), "/".join(words[at:])) for at in range(1, len(words))]
    known = [both for both in splits if {*both} <= {*losses}]
    # Of names that nobody has told, both have as many slashes.
    first, second = known[0] if known else splits[(len(words) + 1) // 2 - 1] if splits else ("", "")
    return (part, first, second) if splits else None
