"""The part of a run that a caller asks for: by rule, statistic, and pattern of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import Event
from gradsurgeon.match import Pattern, compile_pattern, select
from gradsurgeon.store.rank_file import StoredSeries

# The columns of the records in long form, in the order of `gradsurgeon export`.
COLUMNS = ("step", "rank", "rule", "point", "stat", "name", "value")
# Series, each with the columns that were asked for.
Chosen = Sequence[tuple[StoredSeries, Sequence[int]]]


class Selection(NamedTuple):
    """A rule, a statistic and a pattern of names. ``None`` selects all."""

    name: str | None = None
    stat: str | None = None
    rule: str | None = None

    def series(self, every: Iterable[StoredSeries]) -> Chosen:
        """Return the selected columns of some series. Raises `PatternError` if the pattern is malformed."""
        pattern = self._pattern()
        found: list[tuple[StoredSeries, Sequence[int]]] = []
        for series in every:
            rule, stat, _, names = series.key
            if self.rule in (None, rule) and self.stat in (None, stat):
                columns = range(len(names)) if pattern is None else select([pattern], names)
                found += [(series, columns)] if columns else []
        return found

    def events(self, every: Iterable[Event]) -> list[Event]:
        """Return the events that fit by rule and name. An event has no statistic."""
        pattern = self._pattern()
        return [
            event
            for event in every
            if self.rule in (None, event.rule)
            and (pattern is None or (event.name and pattern.matches(event.name)))
        ]

    def _pattern(self) -> Pattern | None:
        return None if self.name is None else compile_pattern(self.name)


def nothing_fits(every: Iterable[StoredSeries], path: Path) -> RecordError:
    """Return the error for a selection that fits no record of the run at a path."""
    stats = sorted({f"{printable(one.key.rule)} {printable(one.key.stat)}" for one in every})
    if not stats:
        return RecordError(f"{printable(str(path))}: nothing was recorded")
    listed = ", ".join(stats)
    return RecordError(
        f"nothing recorded fits the rule, statistic and name asked for; recorded: {listed}"
    )
