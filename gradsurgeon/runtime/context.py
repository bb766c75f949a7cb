"""What the rules of a session may use while they act."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from gradsurgeon.actions import Decision, Edit, EditRule, Rule, TrapRule
from gradsurgeon.compiler import Program
from gradsurgeon.errors import BindError, printable
from gradsurgeon.runtime.activation_flags import Flags
from gradsurgeon.runtime.captured_tensors import CapturedTensors
from gradsurgeon.runtime.due_rules import NONFINITE, BoundRule, DueRules, RulesByCounter
from gradsurgeon.runtime.event_log import EventLog
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.ranks import Ranks
from gradsurgeon.runtime.recorder import Recorder
from gradsurgeon.runtime.scaler_watch import Scaling
from gradsurgeon.runtime.step_counter import StepCounter, StepCounters
from gradsurgeon.store import Records

Mode = Literal["act", "observe"]


@dataclass(eq=False)
class Context:
    """The program of a session and everything it notes while running it.

    Attributes:
        program: what the plan came to.
        parameters: the parameters.
        counters: the clock of each parameter.
        event_log: takes events, and what each rule has done.
        recorder: takes measurements.
        scaling: which gradients carry the scale of a scaler.
        rules: all of them, those included that match nothing on this rank.
        mode: whether edits act.
        outside: the launcher has put the rules on: the script has no session.
        paused: no rule acts until the session goes on; asked by the controller, and by hooks that act on
            their own.
        title: what the model is called, where there are several.
    """

    program: Program
    parameters: Parameters
    counters: StepCounters
    event_log: EventLog
    recorder: Recorder
    scaling: Scaling
    rules: tuple[Rule, ...]
    mode: Mode = "act"
    outside: bool = False
    paused: bool = False
    title: str = ""
    edits: dict[str, Edit] = field(init=False)
    captures: CapturedTensors = field(init=False)
    flags: Flags = field(init=False)
    ranks: Ranks = field(init=False)
    trapped: frozenset[int] = field(init=False)
    decisions: dict[str, Decision] = field(init=False)
    _rules: RulesByCounter = field(init=False)

    def __post_init__(self) -> None:
        self.edits = {rule.id: rule.compile() for rule in self.rules if isinstance(rule, EditRule)}
        self.captures = CapturedTensors(self.event_log)
        self.flags = Flags(self.event_log)
        self.ranks = Ranks(self.parameters.params)
        self.trapped = frozenset(i for stage in self.program.traps for i in stage.tensors)
        self.decisions = {r.id: r.compile() for r in self.rules if isinstance(r, TrapRule)}
        _refuse_thresholds(self.decisions, self.program)
        self._rules = RulesByCounter(self.program, self.counters, self.decisions)

    def silent(self) -> Self:
        """Return the same without a memory: other ranks wait for what is measured, nobody here reads it."""
        silent = copy.copy(self)
        silent.event_log = EventLog(self.rules, [0] * len(self.rules))
        silent.recorder, silent.captures = Recorder(Records()), CapturedTensors(silent.event_log)
        return silent

    def place(self, step: int, rule: str) -> str:
        """Return what a message on a rule begins with."""
        model = f", model {printable(self.title)}" if self.title else ""
        return f"step {step}, rule {rule}{model}"

    def due_rules(self, counter: StepCounter) -> DueRules:
        """Return what is due in the step that a clock is in."""
        return self._rules.due(counter)

    def bound_rule(self, rule: str, counter: StepCounter) -> BoundRule:
        """Return the part of a rule that goes by a clock, due or not."""
        return self._rules.bound_rule(rule, counter)


def _refuse_thresholds(decisions: Mapping[str, Decision], program: Program) -> None:
    """Refuse what can decide on parameters only.

    Raises:
        BindError: naming the rules.
    """
    refused = [r.id for r, _ in program.site_rules if r.id in decisions]
    refused = [rule for rule in refused if decisions[rule].statistic != NONFINITE]
    if refused:
        raise BindError(
            [
                f"rule {rule}: a trap on modules and tags can only ask for elements that are not finite, this "
                f"one asks for `{decisions[rule].statistic}`; use `params`"
                for rule in refused
            ]
        )
