"""Records by the name of a tensor, with errors that list what there is instead.

A running session and a run that was read from a directory share this implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple, TypeVar

from gradsurgeon.errors import RecordError
from gradsurgeon.store.memory import WholeSeries, merged

Answer = TypeVar("Answer")

_NEAREST = 3
NOTHING_RECORDED = 'nothing: a rule {id: norms, action: norm-log, params: "*"} records norms'


class Logged(NamedTuple):
    stats: tuple[str, ...]
    names: frozenset[str]


class RecordQueries(ABC):
    """`history` and `latest` of a session or a run, which makes a `Lookup` of its records."""

    @abstractmethod
    def _lookup(self) -> Lookup:
        """Return the records by name. A session waits for the device first."""

    def history(
        self, name: str, stat: str = "l2", *, rule: str | None = None
    ) -> list[tuple[int, float]]:
        """Return ``(step, value)`` pairs of one tensor, oldest first; nothing if no gradient has arrived.

        In a run of several ranks these are the records of the lowest rank that has some. A session waits for the device.
        For a parameter that ranks share (FSDP2, tensor parallel) the call is a collective while the session is on: all
        ranks that share the parameter must call it. Afterwards the lowest of these ranks answers.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: the id of the `norm-log` rule; needed if several rules record the statistic.

        Raises:
            KeyError: there is no such name; the text gives the nearest names.
            RecordError: no rule, or several rules, record it; or another rank did not call within 10 s.
        """
        return self._asked(name, stat, lambda: self._lookup().history(name, stat, rule))

    def latest(self, name: str, stat: str = "l2", *, rule: str | None = None) -> float:
        """Return the newest value of `history`, under the same conditions and without reading the rest.

        Args:
            name: canonical name or alias.
            stat: the statistic.
            rule: the id of the `norm-log` rule; needed if several rules record the statistic.

        Raises:
            KeyError: there is no such name; the text gives the nearest names.
            RecordError: no rule, or several rules, record it; nothing is recorded yet; or another rank did not call
                within 10 s.
        """
        return self._asked(name, stat, lambda: self._lookup().latest(name, stat, rule))

    def _asked(self, _name: str, _stat: str, answer: Callable[[], Answer]) -> Answer:
        """Return an answer of this process, or of the rank that has the records of a tensor."""
        return answer()


@dataclass(frozen=True, slots=True)
class Lookup:
    known: tuple[str, ...]
    aliases: Mapping[str, str]
    logged: Mapping[str, Logged]  # by rule
    # Returns the series of a tensor, a statistic, and a rule or all rules.
    find: Callable[[str, str, str | None], Sequence[WholeSeries]]

    def history(self, name: str, stat: str, rule: str | None) -> list[tuple[int, float]]:
        canonical, series = self._series(name, stat, rule)
        return merged(series, canonical)

    def latest(self, name: str, stat: str, rule: str | None) -> float:
        canonical, series = self._series(name, stat, rule)
        ends = [end for recorded in series if (end := recorded.last(canonical)) is not None]
        if not ends:
            raise RecordError(
                f"{stat} of {canonical} has not been recorded yet: no gradient has arrived"
            )
        # If two series have the same step, the later series wins, as in `merged`.
        return max(reversed(ends), key=lambda end: end[0])[1]

    def _series(self, name: str, stat: str, rule: str | None) -> tuple[str, Sequence[WholeSeries]]:
        """Return the canonical name and the series of one rule, possibly none yet."""
        canonical = self.aliases.get(name, name)
        if canonical not in self.known:
            near = get_close_matches(name, [*self.known, *self.aliases], n=_NEAREST, cutoff=0.0)
            listed = ", ".join(near) or "none"
            raise KeyError(f"no parameter {name!r} in the model; nearest: {listed}")
        series = self.find(canonical, stat, rule)
        rules = sorted({recorded.key.rule for recorded in series})
        if len(rules) > 1:
            raise RecordError(
                f"{stat} of {canonical} is recorded by several rules: pass rule= one of {', '.join(rules)}"
            )
        logging = {key: one.stats for key, one in self.logged.items() if canonical in one.names}
        if not rules and not any(stat in logging[key] for key in logging if rule in (None, key)):
            recorded = "; ".join(f"{key}: {', '.join(stats)}" for key, stats in logging.items())
            raise RecordError(
                f"{'no rule' if rule is None else f'no rule {rule!r}'} records {stat} of {canonical}; recorded: "
                f"{recorded or NOTHING_RECORDED}"
            )
        return canonical, series
