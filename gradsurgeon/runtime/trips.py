"""A tripped trap, the outcome of its update, and the number of trips in a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradsurgeon.actions import Decision, Spikes
from gradsurgeon.distributed.ranks import FINE, RAISE, SKIP
from gradsurgeon.runtime.context import Mode
from gradsurgeon.runtime.nonfinite_report import TrapReport
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.tensors.measure import Norms

TOO_LATE = (
    "stopped on this rank before the update: the gradients were finite when the ranks voted, right after backward, so the "
    "others may go on with the update, and a rank that skips it alone ends up with other weights than they have"
)
UNKNOWN = (
    "stopped on this rank before the update: this rank does not know the votes of the other ranks on it (the session came after "
    "the backward pass, a rank left, or the key-value store failed), and a rank that skips it alone ends up with other weights"
)
# The id of a trap that judged, and its report if it tripped.
Finding = tuple[str, TrapReport | None]


class Look(NamedTuple):
    """A question of traps on one update that the host can answer only after a read.

    Attributes:
        numbers: the numbers to read together with the numbers of all other traps; a non-finite number is a trip.
        findings: maps, for each of ``numbers``, the tensors that tripped to findings.
    """

    numbers: tuple[Norms, ...]
    findings: Callable[..., Sequence[Finding]]


@dataclass(frozen=True, slots=True)
class Trip:
    """A tripped trap: its report, and the number of trips in a row."""

    rule: str
    decision: Decision | Spikes
    in_a_row: int
    report: TrapReport
    # The reason why the other ranks may not know of it: they voted too early, or their votes are unknown.
    unheard: str = ""

    @property
    def then(self) -> str:
        gives_up = self.in_a_row >= self.decision.give_up_after
        return "raise" if gives_up or self._is_forced else self.decision.then

    @property
    def _is_forced(self) -> bool:
        return bool(self.unheard) and self.decision.then == "skip-step"

    @property
    def severity(self) -> int:
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]

    def outcome(self, mode: Mode) -> str:
        """Return the outcome of the step, as a line of the report."""
        if mode == "observe":
            return f"observing only: `then: {self.decision.then}` would have acted"
        if self._is_forced:
            return self.unheard
        if self.then != self.decision.then:
            return (
                f"giving up: tripped {self.in_a_row} times in a row "
                f"(give_up_after: {self.decision.give_up_after})"
            )
        return {
            "raise": "stopped before the update: no weight was moved",
            "skip-step": "step skipped: no weight and no optimizer state was touched",
            "warn": "the update goes on (`then: warn`)" + self.report.expect,
        }[self.then]


class Rows:
    """The numbers of trips in a row, by rule and tensor, because a script may rebuild its optimizer."""

    def __init__(self) -> None:
        self.lengths: dict[tuple[str, int], int] = {}
        # The numbers with the current update, which is judged after each call of a closure.
        self.current: dict[StepCounter, dict[str, int]] = defaultdict(dict)

    def by_name(self, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return the numbers of trips in a row, by rule and parameter."""
        found: dict[str, dict[str, int]] = {}
        for (rule, tensor), number in self.lengths.items():
            found.setdefault(rule, {})[names[tensor]] = number
        return found

    def resume(self, rows: Mapping[str, Mapping[str, int]], index: Mapping[str, int]) -> None:
        """Resume from the result of `by_name`, given the number of each parameter by its name."""
        self.lengths = {
            (rule, index[name]): number
            for rule, of_rule in rows.items()
            for name, number in of_rule.items()
            if number and name in index
        }

    def of(self, counter: StepCounter, rule: str) -> int:
        return max((self.lengths.get((rule, tensor), 0) for tensor in counter.tensors), default=0)

    def put(self, counter: StepCounter, rule: str, number: int) -> None:
        if number:
            self.lengths.update({(rule, tensor): number for tensor in counter.tensors})
        elif self.lengths:
            for tensor in counter.tensors:
                self.lengths.pop((rule, tensor), None)

    def count(self, counter: StepCounter, rule: str, *, tripped: bool) -> int:
        """Count the current update; return the row with it. `done` makes the count final."""
        times = self.of(counter, rule) + 1 if tripped else 0
        self.current[counter][rule] = times
        return times

    def done(self, counter: StepCounter) -> None:
        for rule, times in self.current.pop(counter, {}).items():
            self.put(counter, rule, times)
