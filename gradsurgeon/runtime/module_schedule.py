"""Which rules on modules and tags act now, and whose optimizer counts the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradsurgeon.actions import Rule
from gradsurgeon.planning import ROOT
from gradsurgeon.runtime.step_counter import StepCounter, StepCounters


class NamedRule(NamedTuple):
    """A rule, and what it calls the tensor that it acts on in records and messages."""

    rule: Rule
    name: str


class Due(NamedTuple):
    """The rules that act at one moment, in file order: on the value of a tensor, then its gradient."""

    values: tuple[NamedRule, ...]
    grads: tuple[NamedRule, ...]


class ModuleSchedule:
    """Which of the rules at one place act in a step: asked in every call, worked out once per step."""

    def __init__(self, rules: Sequence[Rule], owner: str, name: str) -> None:
        self.owner = owner
        # What the tensor of a rule is takes longer to work out than to act on a small one.
        self._rules = [(NamedRule(rule, name), rule.ref.grad) for rule in rules]
        self._known: tuple[int, Due | None, Due | None] | None = None

    def due(self, step: int, *, training: bool) -> Due | None:
        """Return the rules that act in a step, ``None`` where all of them rest."""
        known = self._known
        if known is None or known[0] != step:
            known = (step, self._at(step, training=True), self._at(step, training=False))
            self._known = known
        return known[1] if training else known[2]

    def _at(self, step: int, *, training: bool) -> Due | None:
        due = [
            (named, grad)
            for named, grad in self._rules
            if named.rule.steps.due(step) and (training or named.rule.when is None)
        ]
        values = tuple(named for named, grad in due if not grad)
        return Due(values, tuple(named for named, grad in due if grad)) if due else None


class ModuleCounters:
    """The clock of each module: that of the optimizer which owns its first parameter.

    It can become known as late as after the forward pass, so that whoever needs it asks anew.
    """

    def __init__(self, counters: StepCounters, param_names: Sequence[str]) -> None:
        self._counters = counters
        # Per module that holds parameters, the index of the first of them.
        self._first_params: dict[str, int] = {}
        for index, name in enumerate(param_names):
            self._first_params.setdefault(ROOT, index)
            parts = name.split(".")
            for depth in range(1, len(parts)):
                self._first_params.setdefault(".".join(parts[:depth]), index)

    def of(self, module: str) -> StepCounter:
        param = self._first_params.get(module, self._first_params.get(ROOT))
        return self._counters.common if param is None else self._counters[param]
