"""Which rules on modules and tags act now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsurgeon.actions import Rule
from gradsurgeon.runtime.capture import check_capture
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.state import State


class Due(NamedTuple):
    """The rules that act at one moment, in file order: on the value of a tensor, then its gradient."""

    values: tuple[Rule, ...]
    grads: tuple[Rule, ...]


class Timetable:
    """Which of some rules act now: asked in every call, and worked out once per step.

    Args:
        rules: in file order.
        owner: the module whose clock counts; the root for what has no module.
    """

    def __init__(self, rules: Sequence[Rule], owner: str) -> None:
        self._owner = owner
        # What the tensor of a rule is takes longer to work out than to act on a small one.
        self._rules = [(rule, rule.ref.grad) for rule in rules]
        self._known: tuple[Clock, int, Due | None, Due | None] | None = None

    def due(self, state: State, clock_of: Callable[[str], Clock], *, training: bool) -> Due | None:
        """Return the rules that act now, ``None`` where all of them rest."""
        check_capture(state)
        clock = clock_of(self._owner)
        known = self._known
        if known is None or known[0] is not clock or known[1] != clock.step:
            step = clock.step
            known = (clock, step, self._at(step, training=True), self._at(step, training=False))
            self._known = known
        return known[2] if training else known[3]

    def _at(self, step: int, *, training: bool) -> Due | None:
        due = [
            (rule, grad)
            for rule, grad in self._rules
            if rule.steps.due(step) and (training or rule.when is None)
        ]
        values = tuple(rule for rule, grad in due if not grad)
        return Due(values, tuple(rule for rule, grad in due if grad)) if due else None
