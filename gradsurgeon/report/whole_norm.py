"""Curves of a run: the norm over all parameters together, and single tensors."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gradsurgeon.planning.table import count
from gradsurgeon.report.heat_map import (
    ABSENT,
    MOST_COLUMNS,
    MOST_VALUES,
    NONFINITE,
    ZERO,
    Group,
    HeatMap,
    norm_of,
)
from gradsurgeon.store import WholeSeries
from gradsurgeon.store.layout import CHUNK
from gradsurgeon.store.rank_file import Row, StoredSeries

_Series = TypeVar("_Series", bound=WholeSeries)

# The names of parameters, and the rules that measured them, each with the point.
Measured = tuple[Sequence[str], Collection[tuple[str, str]]]


class Line(NamedTuple):
    """A curve: at each step a value, or ``None`` where there is none."""

    label: str
    steps: list[int]
    values: list[float | None]
    # Of more than one step, the largest that is known of so many.
    every: int = 1


class WholeNorm(NamedTuple):
    """The norm over all parameters that were measured at the same steps and the same point.

    Attributes:
        names: of the parameters.
        sources: the rules that measured them, each with the point.
        line: the norms, with a label that tells them from those of other parameters.
    """

    names: tuple[str, ...]
    sources: frozenset[tuple[str, str]]
    line: Line


class _Part(NamedTuple):
    """What one series has of a whole norm."""

    series: StoredSeries
    columns: Sequence[int]
    groups: Sequence[Group]

    def is_all(self) -> bool:
        return len(self.columns) == len(self.series.key.names)


def whole_norms(
    norms: HeatMap, series: Mapping[StoredSeries, Sequence[str]], params: Collection[str]
) -> list[WholeNorm]:
    """Return the whole norms of what a map shows.

    Args:
        norms: the map.
        series: what it shows, each with the names of the tensors that it is shown for.
        params: the names over which the norm is taken; other tensors have no part in it.
    """
    known = set(params)
    shown = {one: [name for name in names if name in known] for one, names in series.items()}
    found = []
    for together in with_same_steps([one for one, names in shown.items() if names]):
        parts = [
            _Part(one, sorted(one.columns[name] for name in shown[one]), norms.groups[one])
            for one in together
        ]
        names = tuple(name for one in together for name in shown[one])
        sources = frozenset((one.key.rule, one.key.point) for one in together)
        found.append(WholeNorm(names, sources, _of_parts(parts)))
    texts = labels([(one.names, one.sources) for one in found], len(known))
    return [
        whole._replace(line=whole.line._replace(label=label))
        for whole, label in zip(found, texts, strict=True)
    ]


def with_same_steps(series: Sequence[_Series]) -> Iterator[list[_Series]]:
    """Yield series together whose norms add up: taken at one point, in the same steps.

    A sum over whatever a step happens to have would rise and fall with what is due, and not with the gradients.
    """
    found: dict[tuple[object, ...], list[_Series]] = {}
    for one in series:
        if one.ends():
            found.setdefault((one.key.point, one.ends(), len(one)), []).append(one)
    yield from found.values()


def labels(wholes: Sequence[Measured], number: int) -> list[str]:
    """Return what to call each of some whole norms, so that none is called like another.

    Args:
        wholes: names and sources of each.
        number: of the parameters of the model.
    """
    texts = [
        f"norm of {'all ' * (1 < len(names) == number)}{count(len(names), 'parameter')}"
        for names, _ in wholes
    ]
    if len(wholes) == 1:
        return texts
    for place, (_, sources) in enumerate(wholes):
        rules = ", ".join(f"{rule} at {point}" for rule, point in sorted(sources))
        texts[place] += f" ({rules})"
    return [
        f"{text}: {names[0]} ..." if texts.count(text) > 1 else text
        for text, (names, _) in zip(texts, wholes, strict=True)
    ]


def _of_parts(parts: Sequence[_Part]) -> Line:
    """Return the norm over several tensors; of a long run the largest that is known of every few steps."""
    line = Line("", [], [])
    values = sum(len(part.series) * len(part.series.key.names) for part in parts)
    if values <= MOST_VALUES:
        for step, whole in _wholes(parts, every=1):
            line.steps.append(step)
            line.values.append(whole)
        return thinned(line)
    every = CHUNK * -(-len(parts[0].series) // (CHUNK * MOST_COLUMNS))
    wholes = dict(_wholes(parts, every=every))
    steps = sorted(wholes)
    for groups in zip(*(part.groups for part in parts), strict=False):
        largest = max(map(_largest, parts, groups))
        # The whole is no smaller than any part of it, and no more finite.
        least = None if largest == ABSENT else _at_least(largest)
        first, last = groups[0].first, groups[0].last
        within = steps[bisect_left(steps, first) : bisect_right(steps, last)]
        known = [v for v in (least, *(wholes[step] for step in within)) if v is not None]
        line.steps.append(first)
        bad = [value for value in known if not math.isfinite(value)]
        line.values.append(bad[0] if bad else max(known, default=None))
    return thinned(line._replace(every=every))


def _wholes(parts: Sequence[_Part], *, every: int) -> Iterator[tuple[int, float | None]]:
    rows = [part.series.rows() if every == 1 else part.series.sample(every) for part in parts]
    # While the run is being written, one series may have a row that another has not yet.
    for together in zip(*rows, strict=False):
        if len({row.step for row in together}) > 1:
            continue
        present = [
            v for part, row in zip(parts, together, strict=True) for v in _present(part, row)
        ]
        yield together[0].step, math.hypot(*present) if present else None


def _present(part: _Part, row: Row) -> Sequence[float]:
    if row.absent or not part.is_all():
        return [row.values[column] for column in part.columns if column not in row.absent]
    return row.values


def _largest(part: _Part, group: Group) -> int:
    cells = group.cells
    return max(cells if part.is_all() else [cells[column] for column in part.columns])


def _at_least(cell: int) -> float:
    if cell in (ZERO, NONFINITE):
        return 0.0 if cell == ZERO else math.nan
    return norm_of(cell)


def thinned(line: Line) -> Line:
    """Return a line with at most `MOST_COLUMNS` points, the largest of every few; one that is not finite stays."""
    many = -(-len(line.steps) // MOST_COLUMNS)
    if many <= 1:
        return line
    steps, values = [], []
    for start in range(0, len(line.steps), many):
        part = [
            (value, step)
            for step, value in zip(
                line.steps[start : start + many], line.values[start : start + many], strict=True
            )
            if value is not None
        ]
        bad = [pair for pair in part if not math.isfinite(pair[0])]
        value, step = bad[0] if bad else max(part, default=(None, line.steps[start]))
        steps.append(step)
        values.append(value)
    return Line(line.label, steps, values, line.every)


def curve(label: str, series: StoredSeries, name: str) -> Line:
    """Return what a series holds of one tensor, with at most as many points as a map has columns."""
    every = -(-len(series) // MOST_VALUES)
    pairs = (
        series.of(name)
        if every <= 1
        else [(row.step, row.values[series.columns[name]]) for row in series.sample(every)]
    )
    line = Line(label, [step for step, _ in pairs], [value for _, value in pairs], max(1, every))
    return thinned(line)
