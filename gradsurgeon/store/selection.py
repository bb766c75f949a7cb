"""Which part of a run is asked for: by rule, statistic, and pattern of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import Event
from gradsurgeon.match import Pattern, compile_pattern, select
from gradsurgeon.store.rank_file import StoredSeries

if TYPE_CHECKING:
    from gradsurgeon.store.run import Run

# Series, each with those of its columns that were asked for.
Chosen = Sequence[tuple[StoredSeries, Sequence[int]]]


class Selection(NamedTuple):
    """What is asked for; ``None`` asks for all."""

    name: str | None = None  # a pattern, as in rule files
    stat: str | None = None
    rule: str | None = None

    def series(self, run: Run) -> Chosen:
        """Return what fits, which may be nothing. Raises `PatternError` where the pattern is malformed."""
        pattern = self._pattern()
        fitting = [
            (series, _matching(pattern, series.key.names))
            for series in run
            if self.rule in (None, series.key.rule) and self.stat in (None, series.key.stat)
        ]
        return [(series, columns) for series, columns in fitting if columns]

    def recorded(self, run: Run) -> Chosen:
        """Return what fits, as `series` does; raise `RecordError` where nothing does."""
        if chosen := self.series(run):
            return chosen
        raise nothing_fits(run)

    def events(self, run: Run) -> list[Event]:
        """Return the events of what fits by rule and name: an event has no statistic."""
        pattern = self._pattern()
        return [
            event
            for event in run.events
            if self.rule in (None, event.rule)
            and (pattern is None or (event.name and pattern.matches(event.name)))
        ]

    def _pattern(self) -> Pattern | None:
        return None if self.name is None else compile_pattern(self.name)


def _matching(pattern: Pattern | None, names: Sequence[str]) -> Sequence[int]:
    return range(len(names)) if pattern is None else select([pattern], names)


def nothing_fits(run: Run) -> RecordError:
    keys = [series.key for series in run]
    if not keys:
        return RecordError(f"{printable(str(run.path))}: nothing was recorded")
    example = printable(keys[0].names[0]) if keys[0].names else "none"
    return RecordError(
        f"nothing recorded fits the rule, statistic and name asked for; rules: "
        f"{_listed(key.rule for key in keys)}; statistics: {_listed(key.stat for key in keys)}; "
        f"names such as {example}"
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted({printable(text) for text in texts}))
