"""The state of a session that its rules use while they act."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.actions import Decision, EditRule, Rule, Spikes, TrapRule
from gradsurgeon.common.events import Event
from gradsurgeon.distributed.ranks import Ranks
from gradsurgeon.errors import BindError, GradSurgeonError, printable
from gradsurgeon.language.compiler import compile_plan
from gradsurgeon.language.planning import Plan
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.runtime.due_rules import (
    NONFINITE,
    NOTHING_DUE,
    DueRules,
    RulesByCounter,
    Schedule,
    StepCounter,
    StepCounters,
)
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.refusals import Refusals
from gradsurgeon.runtime.scaler_watch import Scaling
from gradsurgeon.tensors import _dist, _job_store, _torch
from gradsurgeon.tensors.measure import read

_ONLY_NONFINITE = "rule {rule}: a trap on modules and tags checks for non-finite elements alone, not `{statistic}`; use `params`"
_NO_CAPTURE = "a CUDA graph is being captured, and its replays run no rule: call session.pause() before the capture"
_CAPTURE = "a CUDA graph is being captured: no rule acts during the capture, nor in its replays"
# Bounds the flags that a long validation between two updates collects.
_MOST = 4096


@dataclass(slots=True)
class Flag:
    """The number of non-finite elements of one tensor when the tensor came into being."""

    rule: Rule
    name: str
    counter: Callable[[], StepCounter]
    # An int if the host could read it without waiting.
    count: Tensor | int
    # Whether the tensor takes part in an update: a gradient always does, a value once a backward pass reaches it.
    fed: bool
    # For a value: an object that lives as long as a backward pass can reach the value.
    graph: weakref.ref[object] | None = None
    # True for a leaf, such as a batch, in a forward pass with gradients. No hook is on a leaf, so the next
    # backward pass decides.
    waits: bool = False

    @property
    def what(self) -> str:
        return str(self.rule.ref)

    @property
    def key(self) -> tuple[str, str]:
        return self.rule.id, self.name

    @property
    def can_feed(self) -> bool:
        """Whether a backward pass can still reach the tensor."""
        return self.waits or (self.graph is not None and self.graph() is not None)


class Flags:
    """All flags since the last update, in the order in which their tensors appeared."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._flags: list[Flag] = []
        self._most = _MOST
        # The latest flag of a forward pass, by rule and tensor.
        self._last: dict[tuple[str, str], Flag] = {}

    def passed(self) -> None:
        """Note a backward pass: the forward pass before it feeds an update."""
        for flag in self._flags:
            flag.fed |= flag.waits

    def is_known(self, rule: str, name: str) -> bool:
        """Return whether the original run of a recomputed forward pass left a flag that can feed an update."""
        # Reentrant checkpointing runs the forward pass without gradients first: such flags can feed none.
        last = self._last.get((rule, name))
        return last is not None and (last.fed or last.waits or last.graph is not None)

    def add(self, flag: Flag, *, again: bool = False) -> None:
        """Add a flag; ``again`` if a forward pass is run again inside a backward pass."""
        if not again:
            self._last[flag.key] = flag
        if len(self._flags) >= self._most:
            self._mention(self._taken(lambda flag: not (flag.fed or flag.can_feed)))
            # The bound grows, because a model may have more modules than `_MOST`.
            self._most = max(_MOST, 2 * len(self._flags))
        self._flags.append(flag)

    def raised(self, counters: Sequence[StepCounter]) -> list[tuple[Flag, int]]:
        """Return, with their counts, the flags so far that the next update must judge."""
        return _counted([f for f in self._flags if f.fed and f.counter() in counters])

    def take(self, counters: Sequence[StepCounter]) -> list[tuple[Flag, int]]:
        """Remove and return, with their counts, the flags that an update must judge. Reads the device once."""
        self._last.clear()
        counted = self._taken(lambda flag: flag.counter() in counters)
        fed = [(flag, count) for flag, count in counted if flag.fed]
        trapped = {flag.key for flag, count in fed if count}
        self._mention([(f, c) for f, c in counted if not f.fed and f.key not in trapped])
        return fed

    def forget(self, counter: StepCounter) -> None:
        self._flags = [flag for flag in self._flags if flag.counter() is not counter]

    def close(self) -> None:
        self._mention(self._taken(lambda _: True))

    def _taken(self, is_wanted: Callable[[Flag], bool]) -> list[tuple[Flag, int]]:
        if not self._flags:
            return []
        wanted = [flag for flag in self._flags if is_wanted(flag)]
        taken = set(map(id, wanted))
        self._flags = [flag for flag in self._flags if id(flag) not in taken]
        return _counted(wanted)

    def _mention(self, dropped: Iterable[tuple[Flag, int]]) -> None:
        for flag, count in dropped:
            if count:
                text = (
                    f"the {flag.what} of {flag.name} was non-finite (elements: {count:,}) in a forward pass that fed "
                    "no update: the trap ignored it"
                )
                rule, step = flag.rule.id, flag.counter().step
                self._event_log.emit("notice", text, rule=rule, step=step, name=flag.name)


def _counted(flags: Sequence[Flag]) -> list[tuple[Flag, int]]:
    counts = iter(read([flag.count for flag in flags if isinstance(flag.count, Tensor)]))
    return [(f, next(counts) if isinstance(f.count, Tensor) else f.count) for f in flags]


Mode = Literal["act", "observe"]


class SessionOptions(NamedTuple):
    """The options of `apply`, and further options for the launcher."""

    # `None` to search for optimizers, empty if the script updates the weights by hand.
    optimizers: Sequence[Optimizer] | None = None
    scaler: GradScaler | None = None
    mode: Mode = "act"
    # The number of the first update.
    start_step: int = 0
    # The launcher applied the rules: the script has no session, or its session acts before this one.
    beside: bool = False
    # Is called with each event.
    on_event: Callable[[Event], object] | None = None
    # Nobody chose these rules for the script: a rule that cannot act rests, and never ends the script.
    lenient: bool = False
    # Shows a line to the person at the terminal; without it lines are warnings and records of `logging`.
    say: Callable[[str], None] | None = None
    # Is called with each diagnosed step, as a function that opens the debugger where the fault was made.
    on_failed_step: Callable[[Callable[[], object]], None] | None = None


class Context:
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        options: SessionOptions,
        event_log: EventLog,
        recorder: Recorder,
    ) -> None:
        self.event_log, self.recorder, self.mode = event_log, recorder, options.mode
        # All rules, also rules that match nothing on this rank.
        self.rules = tuple(plan.rules.rules)
        self.program = compile_plan(plan)
        self.parameters = Parameters(model, self.program.names)
        self.counters = StepCounters(len(self.program.names), options.start_step)
        # The launcher applied the rules: the script has no session.
        self.outside = options.beside
        self.schedule = Schedule(self.rules)
        self.decisions = {r.id: r.compile() for r in self.rules if isinstance(r, TrapRule)}
        self.refusals = Refusals(
            event_log, self.schedule, self.decisions, self.counters, lenient=options.lenient
        )
        # Whether the session was told to pause.
        self._is_paused = False
        # The name of the model, if the process has several.
        self.title = ""
        # Is called with the name and the tensor of each tag, while a step is run again.
        self.tag_watcher: Callable[[str, Tensor], None] | None = None
        self.on_failed_step = options.on_failed_step
        self.scaling = Scaling(options.scaler, self.refusals)
        self.edits = {rule.id: rule.compile() for rule in self.rules if isinstance(rule, EditRule)}
        self.captures = self.recorder.captures
        self.flags = Flags(self.event_log)
        self._several = Ranks(self.parameters.params)
        # The ranks of this process when the last backward pass began.
        self.ranks = Ranks()
        self.trapped = frozenset(i for stage in self.program.traps for i in stage.indices)
        self.spikes = {rule: of for rule, of in self.decisions.items() if isinstance(of, Spikes)}
        # For modules and tags the session keeps flags alone, so other statistics are unknown.
        for rule, _ in self.program.site_rules:
            decision = self.decisions.get(rule.id)
            if isinstance(decision, Decision) and decision.statistic != NONFINITE:
                text = _ONLY_NONFINITE.format(rule=rule.id, statistic=decision.statistic)
                raise BindError([text])
        self.by_counter = RulesByCounter(self.program, self.counters, self.decisions, self.schedule)

    @property
    def paused(self) -> bool:
        """Whether no rule acts now: the session is paused, all its rules rest, or a pack waits for the end of a capture."""
        if self._is_paused or self.refusals.over:
            return True
        return self.refusals.lenient and _torch.is_capturing()

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def meet_ranks(self) -> None:
        """Notice if this process is one of several ranks by now."""
        if self.ranks is not self._several and _dist.world() > 1:
            self.ranks = self._several
            # Later the rank that hosts the store may have ended.
            _job_store.connect()

    def is_due(self, rule: Rule, counter: StepCounter) -> bool:
        return not self.paused and self.schedule.due(rule, counter.step)

    def due_rules(self, counter: StepCounter) -> DueRules:
        return NOTHING_DUE if self.paused else self.by_counter.due(counter)

    def rests(self, step: int) -> bool:
        """Return whether no rule can act at a step, so callers can skip the search for changed parameters."""
        if self.by_counter.any_always:
            return False
        program = self.program
        return not (program.modules or program.tags or self.by_counter.any_due(step))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend all rules, and the search for exchanged parameters, while a step is run again."""
        paused, self._is_paused = self._is_paused, True
        try:
            with self.parameters.lock:
                yield
        finally:
            self._is_paused = paused

    @contextmanager
    def watching_tags(self, watcher: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call a function with the name and the tensor of each tag."""
        self.tag_watcher = watcher
        try:
            yield
        finally:
            self.tag_watcher = None

    def place(self, step: int, rule: str) -> str:
        model = f", model {printable(self.title)}" if self.title else ""
        return f"step {step}, rule {rule}{model}"

    def refuse_graph_capture(self) -> None:
        """Raise if a CUDA graph is being captured; a pack only reports that it waits."""
        if not (self._is_paused or self.refusals.over) and _torch.is_capturing():
            text = _CAPTURE if self.refusals.lenient else _NO_CAPTURE
            self.refusals.abstain(GradSurgeonError(text))
