"""What was recorded of several losses: how far they conflict, and with which weights they were combined.

Which rules have recorded that is told by their statistics, and between which losses by the names in their keys:
`seg/depth`, or `trunk.0.weight:seg/depth` of a part of what the rule matches.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, cast

from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.report.signed_curve import Curve, runs_below, tells_of_turns
from gradsurgeon.store import Key, WholeSeries
from gradsurgeon.store.layout import Stored, unpack_absent

if TYPE_CHECKING:
    from gradsurgeon.store.rank_file import StoredSeries

COSINE, RATIO, OPPOSED = "cosine", "ratio", "opposed"
WEIGHT, DISTANCE = "weight", "distance"
LOSS_STATS = frozenset({COSINE, RATIO, OPPOSED, WEIGHT, DISTANCE})

# So many values are read; of more one call in a few.
MOST_VALUES = 2 * 2**20
# From here on a weight helps more than a method: the smaller gradient turns the larger one by less than a degree.
FAR = 100.0


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
        below_from: the first step in which it was, ``None`` if it never was.
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

    @property
    def _runs(self) -> list[tuple[bool, int]]:
        """The times of conflict and those without; none if most calls know of no conflict, whatever their mean is."""
        runs = runs_below(self.curve)
        is_rare = self.below <= 0.5 and [below for below, _ in runs] == [True]  # noqa: PLR2004 # half of them
        return [] if is_rare else runs

    @property
    def since(self) -> int | None:
        """The step from which on they conflict on average, until the end; ``None`` where they do not at the end."""
        runs = self._runs
        return runs[-1][1] if runs and runs[-1][0] else None

    @property
    def when(self) -> str:
        """In words, when they conflicted on average over some calls."""
        if self.below == 1.0:
            return "throughout"
        runs = self._runs
        if not any(below for below, _ in runs):
            # Nothing of what noise could be is called a time of conflict.
            return "at times" if self.below else "never"
        if len(runs) == 1:
            return "throughout" if tells_of_turns(self.curve) else "on average"
        if runs[-1][0]:
            return f"since step {runs[-1][1]}"
        return f"until step {runs[-1][1]}" if len(runs) == 2 else "at times"  # noqa: PLR2004 # one run below, one not


class Compared(NamedTuple):
    """The pairs of losses that one rule has compared.

    Attributes:
        rule: its id.
        losses: in their order.
        pairs: those of one part after those of another; in each, as the losses stand.
        steps: the first and the last.
        every: one call in so many was read.
    """

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


class Rows(NamedTuple):
    """Some rows of a series, oldest first, and the columns of it that are of no concern."""

    key: Key
    rows: Iterable[Stored]
    repeated: frozenset[int] = frozenset()


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
    shown = [pair for pair in series if pair[0].key.stat in LOSS_STATS]
    values = sum(min(len(one), newest or len(one)) * len(one.key.names) for one, _ in shown)
    every = max(1, -(-values // MOST_VALUES))
    rows = [Rows(one.key, _rows(one, every, newest), skipped) for one, skipped in shown]
    return of_rows(rows, rules, every=every)


def _rows(series: WholeSeries, every: int, newest: int | None) -> Iterable[Stored]:
    start = 0 if newest is None else max(0, len(series) - newest)
    if every == 1 or not hasattr(series, "summaries"):
        return islice(series.stored(), start, None, every)
    # A look-up per row is faster than reading the rows between.
    numbers = range(start, len(series), every)
    return chain.from_iterable(cast("StoredSeries", series).stored(n, n + 1) for n in numbers)


def of_rows(some: Iterable[Rows], rules: Mapping[str, RuleInfo], *, every: int = 1) -> OfLosses:
    by_rule: dict[str, dict[str, dict[str, Curve]]] = {rule: {} for rule in rules}
    for one in some:
        known = by_rule.setdefault(one.key.rule, {}).setdefault(one.key.stat, {})
        for name, curve in _curves(one):
            # A set of parameters that grows, or another one of modules, is another series.
            known[name] = (
                sorted([*known[name], *curve], key=itemgetter(0)) if name in known else curve
            )
    compared, combined = [], []
    for rule, by_stat in by_rule.items():
        named = rules[rule].losses if rule in rules else ()
        if COSINE in by_stat and (found := _compared(rule, by_stat, named, every)) is not None:
            compared.append(found)
        # A statistic of somebody's own may have one of these names, hardly both.
        if by_stat.get(WEIGHT) and by_stat.get(DISTANCE):
            combined.append(_combined(rule, by_stat, every))
    return OfLosses(compared, combined)


def _curves(one: Rows) -> Iterator[tuple[str, Curve]]:
    names, steps, values = one.key.names, list[int](), array("f")
    absent: dict[int, set[int]] = {}
    for place, (step, floats, bits) in enumerate(one.rows):
        steps.append(step)
        values.frombytes(floats)
        for column in unpack_absent(bits):
            absent.setdefault(column, set()).add(place)
    for column, name in enumerate(names):
        if column in one.repeated:
            continue
        pairs = list(zip(steps, values[column :: len(names)], strict=True))
        if column in absent:
            pairs = [pair for place, pair in enumerate(pairs) if place not in absent[column]]
        if pairs:
            yield name, pairs


def _compared(
    rule: str, by_stat: Mapping[str, Mapping[str, Curve]], named: Collection[str], every: int
) -> Compared | None:
    pairs = []
    for name, curve in by_stat[COSINE].items():
        if (split := split_pair(name, named)) is None:
            continue
        known = [(step, value) for step, value in curve if not math.isnan(value)]
        cosines = [value for _, value in known]
        below = [step for step, value in known if value < 0]
        pairs.append(
            Pair(
                *split,
                calls=len(known),
                missing=len(curve) - len(known),
                cosine=_mean(cosines),
                least=min(cosines, default=math.nan),
                below=len(below) / len(known) if known else math.nan,
                below_from=below[0] if below else None,
                ratio=_geometric_mean(_finite(by_stat.get(RATIO, {}).get(name, ()))),
                opposed=_mean(_finite(by_stat.get(OPPOSED, {}).get(name, ()))),
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
    steps = [step for curve in by_stat[COSINE].values() for step, _ in (curve[0], curve[-1])]
    return Compared(rule, losses, pairs, (min(steps), max(steps)), every)


def _combined(rule: str, by_stat: Mapping[str, Mapping[str, Curve]], every: int) -> Combined:
    weights = [_weighed(name, curve) for name, curve in by_stat[WEIGHT].items()]
    curve = sorted((pair for one in by_stat[DISTANCE].values() for pair in one), key=itemgetter(0))
    step, largest = max(curve, key=itemgetter(1))
    return Combined(
        rule,
        weights,
        steps=(curve[0][0], curve[-1][0]),
        calls=len(curve),
        changed=sum(value > 0 for _, value in curve) / len(curve),
        distance=_mean(_finite(curve)),
        largest=largest,
        largest_step=step,
        curve=curve,
        every=every,
    )


def _weighed(name: str, curve: Curve) -> Weighed:
    values = [value for _, value in curve]
    return Weighed(name, len(curve), _mean(values), min(values), max(values), curve)


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


def _finite(curve: Curve) -> list[float]:
    return [value for _, value in curve if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _geometric_mean(values: Sequence[float]) -> float:
    """Return what is as far from 2 as from 1/2, which a mean of ratios would not be."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(fmean(logs)) if logs else math.nan
