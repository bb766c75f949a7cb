"""What the parts of a session share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from gradsurgeon.actions import Edit, Rule
from gradsurgeon.compiler import Program, Stage
from gradsurgeon.errors import printable
from gradsurgeon.runtime.agenda import Agenda, Lane, Lanes
from gradsurgeon.runtime.captures import Captures
from gradsurgeon.runtime.clock import Clock, Clocks
from gradsurgeon.runtime.flags import Flags
from gradsurgeon.runtime.journal import Journal
from gradsurgeon.runtime.ranks import Ranks
from gradsurgeon.runtime.recorder import Recorder
from gradsurgeon.runtime.scaling import Scaling
from gradsurgeon.runtime.targets import Targets
from gradsurgeon.store import Key, Records

Mode = Literal["act", "observe"]


@dataclass(eq=False)
class State:
    """The program of a session and everything it notes while running it."""

    program: Program
    targets: Targets
    clocks: Clocks
    journal: Journal
    recorder: Recorder
    mode: Mode = "act"
    # All of them, those included that match nothing on this rank.
    rules: tuple[Rule, ...] = ()
    paused: bool = False
    # What the model is called, where there are several.
    title: str = ""
    # The launcher has put the rules on: the script has no session.
    outside: bool = False
    # An optimizer may turn up after these backward passes: what an update by hand would have to be told or
    # refused waits until one is seen.
    provisional: bool = False
    # The parameter that a pass reached while an edited gradient was still there.
    compounded: str = ""
    edits: dict[str, Edit] = field(default_factory=dict)
    captures: Captures = field(init=False)
    flags: Flags = field(init=False)
    scaling: Scaling = field(default_factory=Scaling)
    ranks: Ranks = field(init=False)
    trapped: frozenset[int] = field(init=False)
    stages: dict[str, Stage] = field(init=False)
    _in_backward: frozenset[str] = field(init=False)
    _lanes: dict[Clock, Lanes] = field(default_factory=dict)
    _divided: int = -1  # as of which division into clocks

    def __post_init__(self) -> None:
        self.captures = Captures(self.journal)
        self.flags = Flags(self.journal)
        self.ranks = Ranks(self.targets.params)
        self.trapped = frozenset(i for stage in self.program.traps for i in stage.tensors)
        rules = {rule.id: rule for own in self.program.per_tensor.values() for rule in own}
        tensors: dict[str, list[int]] = {}
        for tensor, own in self.program.per_tensor.items():
            for rule in own:
                tensors.setdefault(rule.id, []).append(tensor)
        self.stages = {rule: Stage(rules[rule], tuple(own)) for rule, own in tensors.items()}
        self._in_backward = frozenset(self.stages)
        for stage in (*self.program.after_backward, *self.program.at_step):
            self.stages[stage.rule.id] = stage

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Let nothing be told or recorded of what is measured, because other ranks wait for it."""
        kept = self.journal, self.recorder, self.captures
        self.journal = Journal(self.rules, [0] * len(self.rules))
        self.recorder, self.captures = Recorder(Records()), Captures(self.journal)
        try:
            yield
        finally:
            self.journal, self.recorder, self.captures = kept

    def place(self, step: int, rule: str) -> str:
        """Return what a message on a rule begins with."""
        model = f", model {printable(self.title)}" if self.title else ""
        return f"step {step}, rule {rule}{model}"

    def agenda(self, clock: Clock) -> Agenda:
        """Return what is due in the step that a clock is in."""
        return self._lanes_of(clock).due(clock.step)

    def lane(self, rule: str, clock: Clock) -> Lane:
        """Return the part of a rule that goes by a clock, due or not."""
        return self._lanes_of(clock).lane(rule)

    def _lanes_of(self, clock: Clock) -> Lanes:
        if self._divided != self.clocks.version:
            self._divided = self.clocks.version
            self._lanes.clear()
        lanes = self._lanes.get(clock)
        if lanes is None:
            program = self.program
            own = [stage for name, stage in self.stages.items() if name in self._in_backward]
            lanes = self._lanes[clock] = Lanes(
                *(
                    [lane for stage in stages for lane in self._of(stage, clock)]
                    for stages in (own, program.after_backward, program.at_step)
                )
            )
        return lanes

    def _of(self, stage: Stage, clock: Clock) -> Iterator[Lane]:
        """Yield the part of a stage that goes by a clock, if there is any."""
        own = [tensor for tensor in stage.tensors if self.clocks[tensor] is clock]
        if own:
            yield Lane(stage.rule, clock, tuple(own), self.keys(stage.rule, own))

    def keys(self, rule: Rule, tensors: list[int]) -> dict[str, Key]:
        """Return the series that an observing rule fills for some tensors, by statistic."""
        names = tuple(self.program.names[tensor] for tensor in tensors)
        stats: tuple[str, ...] = getattr(rule, "stats", ())
        return {stat: Key(rule.id, stat, rule.point, names) for stat in stats}
