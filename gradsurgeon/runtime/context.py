"""The state of a session that its rules use while they act."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import Decision, EditRule, FreezeRule, Rule, Spikes, TrapRule
from gradsurgeon.compiler import Program
from gradsurgeon.distributed.ranks import OneProcess, Ranks
from gradsurgeon.errors import BindError, GradSurgeonError, printable
from gradsurgeon.events import Event
from gradsurgeon.recording.event_log import EventLog
from gradsurgeon.recording.recorder import Recorder
from gradsurgeon.runtime.activation_flags import Flags
from gradsurgeon.runtime.due_rules import (
    NONFINITE,
    NOTHING_DUE,
    DueRules,
    RulesByCounter,
    StepCounter,
    StepCounters,
)
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.scaler_watch import Scaling

Mode = Literal["act", "observe"]


class Options(NamedTuple):
    """The options of `apply`, and further options for the launcher."""

    # `None` to search for optimizers, empty if the script updates the weights by hand.
    optimizers: Sequence[Optimizer] | None = None
    scaler: GradScaler | None = None
    mode: Mode = "act"
    # The number of the first update.
    start_step: int = 0
    # The launcher applied the rules: the script has no session, or its session acts before this one.
    beside: bool = False
    # Is called with each event; an exception from it stops the training.
    on_event: Callable[[Event], object] | None = None


@dataclass(eq=False)
class Context:
    program: Program
    parameters: Parameters
    counters: StepCounters
    event_log: EventLog
    recorder: Recorder
    scaling: Scaling
    # All rules, also rules that match nothing on this rank.
    rules: tuple[Rule, ...]
    mode: Mode = "act"
    # The launcher applied the rules: the script has no session.
    outside: bool = False
    # No rule is due until the session resumes, except while ranks agree to act: see `resting`.
    paused: bool = False
    # The name of the model, if the process has several.
    title: str = ""

    def __post_init__(self) -> None:
        self.edits = {rule.id: rule.compile() for rule in self.rules if isinstance(rule, EditRule)}
        self.captures = self.recorder.captures
        self.flags = Flags(self.event_log)
        self._several = Ranks(self.parameters.params)
        # The ranks of this process when the last backward pass began.
        self.ranks = OneProcess()
        self.trapped = frozenset(i for stage in self.program.traps for i in stage.tensors)
        self.decisions = {r.id: r.compile() for r in self.rules if isinstance(r, TrapRule)}
        self.spikes = {rule: of for rule, of in self.decisions.items() if isinstance(of, Spikes)}
        # For modules and tags the session keeps flags alone, so other statistics are unknown.
        for rule, _ in self.program.site_rules:
            decision = self.decisions.get(rule.id)
            if isinstance(decision, Decision) and decision.statistic != NONFINITE:
                raise BindError(
                    [
                        f"rule {rule.id}: a trap on modules and tags can only check for non-finite elements, "
                        f"and this trap checks `{decision.statistic}`; use `params`"
                    ]
                )
        self.by_counter = RulesByCounter(self.program, self.counters, self.decisions)

    def meet_ranks(self) -> bool:
        """Detect whether this process is one of several ranks, and return the answer."""
        if self.ranks is not self._several and _dist.world() > 1:
            self.ranks = self._several
        return self.ranks is self._several

    def is_due(self, rule: Rule, counter: StepCounter) -> bool:
        return not self.paused and rule.steps.due(counter.step)

    def due_rules(self, counter: StepCounter) -> DueRules:
        return NOTHING_DUE if self.paused else self.by_counter.due(counter)

    def rests(self, step: int) -> bool:
        """Return whether no rule can act at a step, so callers can skip the search for changed parameters."""
        if self.by_counter.any_always:
            return False
        program = self.program
        return not (program.modules or program.tags or self.by_counter.any_due(step))

    @contextmanager
    def resting(self, *, rests: bool) -> Iterator[None]:
        """Suspend the rules within the context, or run them although paused, as all ranks agreed."""
        paused, self.paused = self.paused, rests
        try:
            yield
        finally:
            self.paused = paused

    def place(self, step: int, rule: str) -> str:
        model = f", model {printable(self.title)}" if self.title else ""
        return f"step {step}, rule {rule}{model}"

    def refuse_graph_capture(self) -> None:
        """Raise if a CUDA graph is being captured and its replays would silence a rule."""
        if self.paused or not _torch.is_capturing():
            return
        for rule, reason in rules_lost_in_replay(self.program):
            raise GradSurgeonError(
                f"rule {rule}: a CUDA graph is being captured, its replays run no Python, and {reason}: "
                "capture without the rule (session.pause() or remove()), or train without the graph"
            )
        text = (
            "a CUDA graph is being captured: its replays repeat the edits of the rules, but count no steps, "
            "firings or changes, and report no non-finite norms"
        )
        self.event_log.notice_once("cuda-graph", text, step=self.counters.latest)


def rules_lost_in_replay(program: Program) -> Iterator[tuple[str, str]]:
    """Yield each rule that needs Python, which a replay of a CUDA graph does not run, and the reason."""
    for rule in program.rules:
        if not isinstance(rule, EditRule | FreezeRule):
            yield rule.id, f"`{rule.action}` must read each step from Python"
        elif not rule.steps.always:
            yield rule.id, "Python evaluates its `steps`"
