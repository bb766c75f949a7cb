"""Asking records by the name of a tensor, with errors that say what there is instead.

One implementation for a running session and for a run that was read from a directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from gradsurgeon.errors import RecordError, did_you_mean
from gradsurgeon.store.memory import Measured, merged

# Returns the series that measure one tensor with one statistic, of one rule or of all.
Find = Callable[[str, str, str | None], Sequence[Measured]]

_NEAREST = 3
# One step can pass without a gradient for innocent reasons; a value from before three is no news.
_QUIET_STEPS = 3


@dataclass(frozen=True, slots=True)
class Logged:
    """What one rule records: which statistics of which tensors."""

    stats: tuple[str, ...]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Names:
    """What can be asked for.

    Attributes:
        known: canonical names, in the order of the model.
        aliases: other names of the same tensors, with the canonical one.
        logged: by rule id, what is recorded.
    """

    known: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    logged: Mapping[str, Logged] = field(default_factory=dict)

    def canonical(self, name: str) -> str:
        """Return the canonical name.

        Raises:
            KeyError: there is no such name; the nearest ones are given.
        """
        found = self.aliases.get(name, name)
        if found in self.known:
            return found
        every = [*self.known, *self.aliases]
        near = did_you_mean(name, every)
        if not near:
            # Nothing is alike: whatever is least unlike still shows how names look here.
            least = get_close_matches(name, every, n=_NEAREST, cutoff=0.0)
            near = f"nearest: {', '.join(least)}" if least else "there are none"
        raise KeyError(f"no parameter {name!r} in the model; {near}")

    def check_recorded(self, name: str, stat: str, rule: str | None) -> None:
        """Refuse a question that no rule will ever answer.

        Raises:
            RecordError: no rule records that of the tensor.
        """
        logging = {one: what for one, what in self.logged.items() if name in what.names}
        if rule is not None and rule not in logging:
            hint = did_you_mean(rule, logging)
            hint = hint or f"rules that record it: {', '.join(logging) or 'none'}"
            raise RecordError(f"the rule {rule!r} records nothing of {name}; {hint}")
        asked = [logging[rule]] if rule is not None else logging.values()
        stats = sorted({one for what in asked for one in what.stats})
        if stat not in stats:
            what = ", ".join(stats) or "nothing"
            raise RecordError(f"no rule records {stat} of {name}; recorded: {what}")


@dataclass(frozen=True, slots=True)
class Lookup:
    """Records by name or alias."""

    names: Names
    find: Find
    # By rule, tensor and step, in how many steps after that the rule was due, where that is known.
    due_since: Callable[[str, str, int], int] | None = None

    def history(
        self, name: str, stat: str = "l2", *, rule: str | None = None
    ) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor, oldest first; nothing where no gradient has arrived.

        Raises:
            KeyError: no such name; the nearest ones are given.
            RecordError: recorded by no rule, or by several.
        """
        canonical = self.names.canonical(name)
        rows = merged(self._found(canonical, stat, rule), canonical)
        if not rows:
            self.names.check_recorded(canonical, stat, rule)
        return rows

    def latest(self, name: str, stat: str = "l2", *, rule: str | None = None) -> float:
        """Return the newest of what `history` returns, without reading the rest.

        Raises:
            KeyError: no such name; the nearest ones are given.
            RecordError: nothing recorded, or by several rules, or nothing in the last three steps in
                which there should have been.
        """
        canonical = self.names.canonical(name)
        series = self._found(canonical, stat, rule)
        found = [one.last(canonical) for one in series]
        # Of two series with the same step the later one stands, as in `merged`.
        ends = [(end[0], place, end[1]) for place, end in enumerate(found) if end is not None]
        if not ends:
            self.names.check_recorded(canonical, stat, rule)
            raise RecordError(
                f"{stat} of {canonical} has not been recorded yet: no gradient has arrived"
            )
        self._check_age(canonical, stat, series)
        return max(ends, key=lambda end: end[:2])[2]

    def _check_age(self, name: str, stat: str, series: Sequence[Measured]) -> None:
        """Refuse what is old where there should be something newer.

        Raises:
            RecordError: nothing was measured in several steps in which the rule was due.
        """
        newest = max(step for one in series if (step := one.newest()) is not None)
        by = series[0].key.rule
        missed = 0 if self.due_since is None else self.due_since(by, name, newest)
        if missed >= _QUIET_STEPS:
            raise RecordError(
                f"rule {by}: the last record of {stat} of {name} is of step {newest}, and nothing was "
                f"measured in the {_QUIET_STEPS} steps in which the rule was due last; history() returns "
                "what there is"
            )

    def _found(self, name: str, stat: str, rule: str | None) -> Sequence[Measured]:
        found = self.find(name, stat, rule)
        rules = sorted({series.key.rule for series in found})
        if len(rules) > 1:
            raise RecordError(
                f"{stat} of {name} is recorded by several rules: pass rule= one of {', '.join(rules)}"
            )
        return found
