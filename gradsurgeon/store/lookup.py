"""Asking records by the name of a tensor, with errors that say what there is instead.

One implementation for a running session and for a run that was read from a directory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gradsurgeon.errors import RecordError
from gradsurgeon.store.memory import RecordedSeries, merged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEAREST = 3
# One step can pass without a gradient for innocent reasons; a value from before three is no news.
_QUIET_STEPS = 3


class Logged(NamedTuple):
    stats: tuple[str, ...]
    names: frozenset[str]


class RecordQueries(ABC):
    """`history` and `latest` of whatever can make a `Lookup` of its records."""

    @abstractmethod
    def _lookup(self) -> Lookup:
        """Return the records by name; of a session, after waiting for the device."""

    def _draw(self, kind: str, **options: object) -> Figure:
        # `gradsurgeon.report` lies above records, and is only needed once a caller draws.
        figure: Figure = import_module("gradsurgeon.report.pictures").draw(self, kind, **options)
        return figure

    def history(
        self, name: str, stat: str = "l2", *, rule: str | None = None
    ) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first; nothing where no gradient has arrived.

        Of a run of several ranks these are the records of the lowest rank that has some; in a session it
        waits for the device.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: id of the `norm-log` rule; needed where several recorded it.

        Raises:
            KeyError: no such name; the nearest ones are given.
            RecordError: recorded by no rule, or by several.
        """
        return self._lookup().history(name, stat, rule)

    def latest(self, name: str, stat: str = "l2", *, rule: str | None = None) -> float:
        """Return the newest value of what `history` returns, without reading the rest.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: id of the `norm-log` rule; needed where several recorded it.

        Raises:
            KeyError: no such name; the nearest ones are given.
            RecordError: nothing recorded, or by several rules, or, in a session, nothing in the last
                three steps in which there should have been.
        """
        return self._lookup().latest(name, stat, rule)


@dataclass(frozen=True, slots=True)
class Lookup:
    known: tuple[str, ...]
    aliases: Mapping[str, str]
    logged: Mapping[str, Logged]  # by rule
    # Returns the series of one tensor and one statistic, of one rule or of all.
    find: Callable[[str, str, str | None], Sequence[RecordedSeries]]
    # Returns by rule, tensor and step in how many steps after that the rule was due.
    due_since: Callable[[str, str, int], int] = lambda *_: 0

    def history(self, name: str, stat: str, rule: str | None) -> list[tuple[int, float]]:
        canonical, series = self._series(name, stat, rule)
        rows = merged(series, canonical)
        if not rows:
            self._check_recorded(canonical, stat, rule)
        return rows

    def latest(self, name: str, stat: str, rule: str | None) -> float:
        canonical, series = self._series(name, stat, rule)
        ends = [end for recorded in series if (end := recorded.last(canonical)) is not None]
        if not ends:
            self._check_recorded(canonical, stat, rule)
            raise RecordError(
                f"{stat} of {canonical} has not been recorded yet: no gradient has arrived"
            )
        self._check_age(canonical, stat, series)
        # Of two series with the same step the later one stands, as in `merged`.
        return max(reversed(ends), key=lambda end: end[0])[1]

    def _canonical(self, name: str) -> str:
        canonical = self.aliases.get(name, name)
        if canonical in self.known:
            return canonical
        near = get_close_matches(name, [*self.known, *self.aliases], n=_NEAREST, cutoff=0.0)
        raise KeyError(f"no parameter {name!r} in the model; nearest: {', '.join(near) or 'none'}")

    def _check_recorded(self, name: str, stat: str, rule: str | None) -> None:
        """Refuse a question that no rule will ever answer."""
        logging = {key: logged for key, logged in self.logged.items() if name in logged.names}
        asked = [logging[key] for key in logging if rule in (None, key)]
        if not any(stat in logged.stats for logged in asked):
            recorded = "; ".join(f"{key}: {', '.join(one.stats)}" for key, one in logging.items())
            raise RecordError(
                f"{'no rule' if rule is None else f'no rule {rule!r}'} records {stat} of {name}; recorded: "
                f"{recorded or 'nothing'}"
            )

    def _check_age(self, name: str, stat: str, series: Sequence[RecordedSeries]) -> None:
        """Refuse a value that is old although the rule was due since."""
        newest = max(end for recorded in series for end in recorded.ends())
        rule = series[0].key.rule
        if self.due_since(rule, name, newest) >= _QUIET_STEPS:
            raise RecordError(
                f"rule {rule}: the last record of {stat} of {name} is of step {newest}, and nothing was "
                f"measured in the {_QUIET_STEPS} steps in which the rule was due last; history() returns "
                "what there is"
            )

    def _series(
        self, name: str, stat: str, rule: str | None
    ) -> tuple[str, Sequence[RecordedSeries]]:
        canonical = self._canonical(name)
        series = self.find(canonical, stat, rule)
        rules = sorted({recorded.key.rule for recorded in series})
        if len(rules) > 1:
            raise RecordError(
                f"{stat} of {canonical} is recorded by several rules: pass rule= one of {', '.join(rules)}"
            )
        return canonical, series
