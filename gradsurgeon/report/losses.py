"""What was recorded of several losses: how far they conflict, and with which weights they were combined. Needs numpy.

Which rules have recorded that is told by their statistics, and between which losses by the names in their keys:
`seg/depth`, or `trunk.0.weight:seg/depth` of a part of what the rule matches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradsurgeon.report.sheets import is_stored
from gradsurgeon.report.rules_and_events import (
    COSINE,
    DISTANCE,
    LOSS_STATS,
    OPPOSED,
    RATIO,
    WEIGHT,
    RuleInfo,
)
from gradsurgeon.store import WholeSeries
from gradsurgeon.store.tables import arrays

if TYPE_CHECKING:
    from gradsurgeon.store.rank_file import StoredSeries

# So many values are read; of more one call in a few.
MOST_VALUES = 2 * 2**20


class Curve(NamedTuple):
    """Steps and values of each call, oldest first; a step may have several."""

    steps: NDArray[np.int64]
    values: NDArray[np.floating[Any]]

    def without(self, there: NDArray[np.bool_]) -> Curve:
        return Curve(self.steps[there], self.values[there])

    @property
    def finite(self) -> NDArray[np.floating[Any]]:
        return np.asarray(self.values[np.isfinite(self.values)])


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
        opposed: the mean share of elements with opposite signs, by norm.
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
    opposed: float
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

    @property
    def parts(self) -> dict[str, list[Pair]]:
        found: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            found.setdefault(pair.part, []).append(pair)
        return found

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
            (COSINE, RATIO, OPPOSED) * bool(self.compared)
            + (WEIGHT, DISTANCE) * bool(self.combined)
        )


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
    by_rule: dict[str, dict[str, dict[str, Curve]]] = {rule: {} for rule in rules}
    for one, repeated in shown:
        known = by_rule.setdefault(one.key.rule, {}).setdefault(one.key.stat, {})
        for name, curve in _curves(one, repeated, every, newest):
            # A set of parameters that grows, or another one of modules, is another series.
            known[name] = _joined([known[name], curve]) if name in known else curve
    compared, combined = [], []
    for rule, by_stat in by_rule.items():
        named = rules[rule].losses if rule in rules else ()
        if COSINE in by_stat and (found := _compared(rule, by_stat, named, every)) is not None:
            compared.append(found)
        # A statistic of somebody's own may have one of these names, hardly both.
        if by_stat.get(WEIGHT) and by_stat.get(DISTANCE):
            combined.append(_combined(rule, by_stat, every))
    return OfLosses(compared, combined)


def _curves(
    series: WholeSeries, repeated: frozenset[int], every: int, newest: int | None
) -> Iterator[tuple[str, Curve]]:
    start = 0 if newest is None else max(0, len(series) - newest)
    if every == 1 or not is_stored(series):
        rows = list(islice(series.stored(), start, None, every))
    else:
        rows = list(cast("StoredSeries", series).one_in(every, start))
    if not rows:
        return
    steps, values, present = arrays(rows, len(series.key.names))
    for column, name in enumerate(series.key.names):
        if column not in repeated and present[:, column].any():
            yield name, Curve(steps, values[:, column].astype(float)).without(present[:, column])


def _joined(curves: Iterable[Curve]) -> Curve:
    found = [_NONE, *curves]
    steps = np.concatenate([curve.steps for curve in found])
    order = np.argsort(steps, kind="stable")
    return Curve(steps[order], np.concatenate([curve.values for curve in found])[order])


def _compared(
    rule: str, by_stat: Mapping[str, Mapping[str, Curve]], named: Collection[str], every: int
) -> Compared | None:
    pairs = []
    for name, curve in by_stat[COSINE].items():
        if (split := split_pair(name, named)) is None:
            continue
        known = curve.without(~np.isnan(curve.values))
        below = known.steps[known.values < 0]
        ratios = by_stat.get(RATIO, {}).get(name, _NONE).finite
        # A mean of ratios would not be as far from 2 as from 1/2.
        logs = np.log(ratios[ratios > 0])
        pairs.append(
            Pair(
                *split,
                calls=len(known.steps),
                missing=len(curve.steps) - len(known.steps),
                cosine=_mean(known.values),
                least=float(known.values.min()) if len(known.values) else math.nan,
                below=len(below) / len(known.steps) if len(known.steps) else math.nan,
                below_from=int(below[0]) if len(below) else None,
                ratio=math.exp(_mean(logs)) if len(logs) else math.nan,
                opposed=_mean(by_stat.get(OPPOSED, {}).get(name, _NONE).finite),
                curve=known,
            )
        )
    if not pairs:
        return None
    found = dict.fromkeys(loss for pair in pairs for loss in (pair.first, pair.second))
    order = [loss for loss in named if loss in found]
    losses = (*order, *(loss for loss in found if loss not in order))
    place = {loss: number for number, loss in enumerate(losses)}
    parts = {part: number for number, part in enumerate(dict.fromkeys(one.part for one in pairs))}
    pairs.sort(key=lambda one: (parts[one.part], place[one.first], place[one.second]))
    steps = _joined(by_stat[COSINE].values()).steps
    return Compared(rule, losses, pairs, (int(steps[0]), int(steps[-1])), every)


def _combined(rule: str, by_stat: Mapping[str, Mapping[str, Curve]], every: int) -> Combined:
    weights = [_weighed(name, one) for name, one in by_stat[WEIGHT].items()]
    curve = _joined(by_stat[DISTANCE].values())
    top = int(np.argmax(curve.values))
    return Combined(
        rule,
        weights,
        steps=(int(curve.steps[0]), int(curve.steps[-1])),
        calls=len(curve.steps),
        changed=float((curve.values > 0).mean()),
        distance=_mean(curve.finite),
        largest=float(curve.values[top]),
        largest_step=int(curve.steps[top]),
        curve=curve,
        every=every,
    )


def _weighed(name: str, curve: Curve) -> Weighed:
    least, largest = float(curve.values.min()), float(curve.values.max())
    return Weighed(name, len(curve.steps), _mean(curve.values), least, largest, curve)


def split_pair(name: str, losses: Collection[str]) -> tuple[str, str, str] | None:
    """Return the part and the two losses that a name such as ``trunk.0.weight:seg/depth`` is made of.

    Args:
        name: of a record.
        losses: those that the rule compares, as far as they are known: only they tell of a loss called
            ``train/seg`` where it ends.
    """
    for slash in _places(name, "/"):
        left, right = name[:slash], name[slash + 1 :]
        if right in losses:
            for colon in (-1, *_places(left, ":")):
                if left[colon + 1 :] in losses:
                    return left[: max(0, colon)], left[colon + 1 :], right
    part, _, pair = name.rpartition(":")
    words = pair.split("/")
    middle = (len(words) + 1) // 2
    return (part, "/".join(words[:middle]), "/".join(words[middle:])) if words[1:] else None


def _places(text: str, letter: str) -> list[int]:
    return [place for place, one in enumerate(text) if one == letter]


def _mean(values: NDArray[np.floating[Any]]) -> float:
    return float(values.mean()) if len(values) else math.nan
