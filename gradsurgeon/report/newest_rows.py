"""The newest rows of a run: what is read of it again and again while it is being written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from typing import NamedTuple

from gradsurgeon.report.losses import LOSS_STATS, OfLosses, Rows, of_rows
from gradsurgeon.report.measurements import STAT, Measurements, NormHistory, history_of
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store import Key, merged
from gradsurgeon.store.rank_file import Row, StoredSeries
from gradsurgeon.store.run import Run, of_lowest_ranks

# So many rows of each series are in view; fewer of a very large model, down to what tells a spike.
_ROWS_MOST, _ROWS_LEAST = 256, 32
_VALUES = 2**18


class _View:
    """The newest rows of one series."""

    def __init__(self, series: StoredSeries, rows: int, repeated: frozenset[int]) -> None:
        self.key = series.key
        self._columns = series.columns
        self._rows: list[Row] = []
        self._values = array("f")
        self._absent: dict[int, set[int]] = {}  # by column, the places of rows without a value
        for place, row in enumerate(series.rows(max(0, len(series) - rows))):
            absent = row.absent | repeated
            self._rows.append(Row(row.step, row.values, absent))
            self._values += row.values
            for column in absent:
                self._absent.setdefault(column, set()).add(place)
        self.steps = [row.step for row in self._rows]

    def has(self, name: str) -> bool:
        return len(self._absent.get(self._columns[name], ())) < len(self._rows)

    def is_full(self, name: str) -> bool:
        return self._columns[name] not in self._absent

    def of(self, name: str) -> list[tuple[int, float]]:
        column = self._columns[name]
        pairs = list(zip(self.steps, self._values[column :: len(self._columns)], strict=True))
        if absent := self._absent.get(column):
            return [pair for place, pair in enumerate(pairs) if place not in absent]
        return pairs

    def last(self, name: str) -> tuple[int, float] | None:
        return next(reversed(self.of(name)), None)

    def ends(self) -> tuple[int, ...]:
        return (self.steps[0], self.steps[-1])

    def totals(self) -> dict[int, float]:
        """Return by step the norm of all tensors together, where one was measured."""
        return {
            row.step: hypot(*_present(row))
            for row in self._rows
            if len(row.absent) < len(row.values)
        }


def _present(row: Row) -> Iterable[float]:
    if not row.absent:
        return row.values
    return (value for column, value in enumerate(row.values) if column not in row.absent)


class TotalNorm(NamedTuple):
    """The norm of many tensors together by step, and the rule and the point that it is of."""

    rule: str
    point: str
    names: frozenset[str]
    history: tuple[tuple[int, float], ...]


def newest_of_losses(run: Run, rules: Mapping[str, RuleInfo]) -> OfLosses:
    """Return what was recorded of several losses in the newest rows."""
    shown = [pair for pair in of_lowest_ranks(run) if pair[0].key.stat in LOSS_STATS]
    rows = _rows_in_view(series for series, _ in shown)
    newest = [
        Rows(series.key, series.stored(max(0, len(series) - rows)), repeated)
        for series, repeated in shown
    ]
    return of_rows(newest, rules)


def _rows_in_view(series: Iterable[StoredSeries]) -> int:
    width = sum(len(one.key.names) for one in series)
    return max(_ROWS_LEAST, min(_ROWS_MOST, _VALUES // max(1, width)))


class NewestRows(Measurements):
    """The newest l2 norms of a run. However long it is, reading them takes the same time."""

    def __init__(self, run: Run) -> None:
        shown = [pair for pair in of_lowest_ranks(run) if pair[0].key.stat == STAT]
        rows = _rows_in_view(series for series, _ in shown)
        views = [_View(series, rows, repeated) for series, repeated in shown]
        self._views = [view for view in views if view.steps]
        super().__init__(self._views)
        self._by_name: dict[str, list[_View]] = {}
        for view in self._views:
            for name in filter(view.has, view.key.names):
                self._by_name.setdefault(name, []).append(view)

    def keys_of(self, name: str) -> list[Key]:
        return [view.key for view in self._by_name.get(name, ())]

    def history(self, name: str, rule: str, point: str) -> NormHistory:
        views = _by(rule, point, self._by_name[name])
        if len(views) == 1 and views[0].is_full(name):
            return history_of(views[0].of(name), [])
        # A tensor that moved on to another series may have left the one before it long ago.
        begin = _newest(views).steps[0]
        pairs = [pair for pair in merged(views, name) if pair[0] >= begin]
        measured = {step for step, _ in pairs}
        steps = {step for view in views for step in view.steps if step >= begin}
        return history_of(pairs, [(step, None) for step in sorted(steps - measured)])

    def sources(self) -> dict[tuple[str, str], set[str]]:
        """Return by rule and point the names that are measured."""
        found: dict[tuple[str, str], set[str]] = {}
        for view in self._views:
            names = found.setdefault((view.key.rule, view.key.point), set())
            names.update(filter(view.has, view.key.names))
        return found

    def total(self, rule: str, point: str) -> TotalNorm:
        """Return the norm of all tensors together that a rule measures now at a point.

        Tensors of optimizers that take turns count their steps each on their own: then it is the norm
        of those whose turn it is.
        """
        views = _by(rule, point, self._views)
        # Tensors have left a series that is more than a row behind.
        earliest = _newest(views).steps[-2:][0]
        live = [view for view in views if view.steps[-1] >= earliest]
        by_step = [view.totals() for view in live]
        # Of the newest step some series may be there, and others not yet.
        steps = sorted(set.intersection(*map(set, by_step)))
        return TotalNorm(
            rule,
            point,
            frozenset(name for view in live for name in view.key.names if view.has(name)),
            tuple((step, hypot(*(totals[step] for totals in by_step))) for step in steps),
        )


def _by(rule: str, point: str, views: Sequence[_View]) -> list[_View]:
    return [view for view in views if (view.key.rule, view.key.point) == (rule, point)]


def _newest(views: Sequence[_View]) -> _View:
    return max(views, key=lambda view: view.steps[-1])
