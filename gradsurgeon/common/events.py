"""The events of a session, as plain values."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

EventKind = Literal[
    "trap",
    "spike",
    "check",
    "skipped-step",
    "scaler-skip",
    "never-fired",
    "hook-lost",
    "hook-rearmed",
    "fact",
    "notice",
]

# The kinds of events by which a rule says that an update is not as it should be.
TRIPS: frozenset[EventKind] = frozenset({"trap", "spike", "check"})
# Begins the notice that all rules of a session rest.
NO_RULE_ACTS = "no rule acts: "
OUR_FAULT = "a fault of gradsurgeon, please report it"
# In the notice of a skipped step whose NaN is no overflow.
NO_OVERFLOW = "the GradScaler skips a step that no loss scale can mend"


@dataclass(frozen=True, slots=True)
class Event:
    """One noteworthy moment of a run.

    ``rule`` and ``name`` are empty if the event concerns no single rule or parameter; ``step`` is the
    number of the update, counted from 0 for each optimizer. ``diagnosis`` has the keys of `Diagnosis.to_json`.
    ``sample_ids`` are the numbers that the script tagged ``sample_ids`` in this step, at most 256. ``told_at`` is the
    step before which the host learnt of it, if the device decided on the update.
    """

    kind: EventKind
    rule: str
    step: int
    rank: int
    name: str
    message: str
    diagnosis: Mapping[str, Any] | None = None
    sample_ids: tuple[int, ...] = ()
    told_at: int | None = None


def is_trip(event: Event, edits: Container[str] = ()) -> bool:
    """Tell whether a trap tripped; ``edits`` are rules that clip instead."""
    return event.kind in TRIPS and event.rule not in edits


@dataclass(frozen=True, slots=True)
class RuleStatus:
    """The work of one rule so far.

    ``matched`` counts parameters. ``fired`` counts actions on single tensors (for a trap: its checks). ``altered``
    counts the actions that altered at least one element (for a trap: the checks that tripped). It is ``None`` if that is not
    counted: edits of single elements, such as `clamp`, count it under ``mode="observe"`` alone. ``last_step`` is the
    latest update in which the rule fired, ``None`` before the first.
    """

    matched: int
    fired: int
    altered: int | None
    last_step: int | None
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> float | None:
        """The share of the actions that altered something, 0 before the first action; ``None`` if that is not counted."""
        if self.altered is None:
            return None
        return self.altered / max(1, self.fired)


def settled(status: RuleStatus, pending: Mapping[str, int]) -> RuleStatus:
    """Return a status whose last step is no step of a pass that still waits for its update."""
    last = status.last_step
    if last and last in pending.values():
        return replace(status, last_step=last - 1)
    return status
