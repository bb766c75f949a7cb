"""What the parts of a session share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gradsurgeon.actions import Edit, Rule
from gradsurgeon.compiler import Program, Stage
from gradsurgeon.runtime.captures import Captures
from gradsurgeon.runtime.clock import Clock, Clocks
from gradsurgeon.runtime.flags import Flags
from gradsurgeon.runtime.journal import Journal
from gradsurgeon.runtime.ranks import Ranks
from gradsurgeon.runtime.recorder import Recorder
from gradsurgeon.runtime.scaling import Scaling
from gradsurgeon.runtime.targets import Targets
from gradsurgeon.store import Key

Mode = Literal["act", "observe"]


@dataclass(frozen=True, slots=True)
class Lane:
    """The tensors of one stage that go by one clock."""

    rule: Rule
    clock: Clock
    tensors: tuple[int, ...]
    keys: dict[str, Key]


@dataclass(eq=False)
class State:
    """The program of a session and everything it notes while running it."""

    program: Program
    targets: Targets
    clocks: Clocks
    journal: Journal
    recorder: Recorder
    mode: Mode = "act"
    paused: bool = False
    edits: dict[str, Edit] = field(default_factory=dict)
    captures: Captures = field(init=False)
    flags: Flags = field(init=False)
    scaling: Scaling = field(default_factory=Scaling)
    ranks: Ranks = field(init=False)
    trapped: frozenset[int] = field(init=False)
    stages: dict[str, Stage] = field(init=False)
    _lanes: dict[int, tuple[int, tuple[Lane, ...]]] = field(default_factory=dict)

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
        for stage in (*self.program.after_backward, *self.program.at_step):
            self.stages[stage.rule.id] = stage

    def lanes(self, stage: Stage) -> tuple[Lane, ...]:
        """Return a stage divided by clock; kept until the division changes."""
        kept = self._lanes.get(id(stage))
        if kept is None or kept[0] != self.clocks.version:
            kept = (self.clocks.version, tuple(self._divide(stage)))
            self._lanes[id(stage)] = kept
        return kept[1]

    def _divide(self, stage: Stage) -> list[Lane]:
        groups: dict[int, list[int]] = {}
        for tensor in stage.tensors:
            groups.setdefault(id(self.clocks[tensor]), []).append(tensor)
        return [
            Lane(stage.rule, self.clocks[group[0]], tuple(group), self.keys(stage.rule, group))
            for group in groups.values()
        ]

    def keys(self, rule: Rule, tensors: list[int]) -> dict[str, Key]:
        """Return the series that an observing rule fills for some tensors, by statistic."""
        names = tuple(self.program.names[tensor] for tensor in tensors)
        stats: tuple[str, ...] = getattr(rule, "stats", ())
        return {stat: Key(rule.id, stat, rule.point, names) for stat in stats}
