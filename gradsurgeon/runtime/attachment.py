"""A plan attached to a model: what the registry and the launcher deal with, and a `Session` shows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from torch import nn

from gradsurgeon import _live
from gradsurgeon.actions import ObserverRule
from gradsurgeon.compiler import compile_plan
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.planning import Module, Param, Plan
from gradsurgeon.recording.event_log import EventLog
from gradsurgeon.recording.recorder import Recorder
from gradsurgeon.runtime import compile_support
from gradsurgeon.runtime.context import Context, Options
from gradsurgeon.runtime.controller import Controller
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.scaler_watch import Scaling, refuse_scaling
from gradsurgeon.runtime.step_counter import StepCounters
from gradsurgeon.store import Logged, Lookup, Records

if TYPE_CHECKING:
    from gradsurgeon.store.writer import RunWriter


class Attachment:
    """Rules acting on one model, until `remove()`. It reaches the model weakly, and lives as long."""

    def __init__(
        self, model: nn.Module, plan: Plan, options: Options, writer: RunWriter | None = None
    ) -> None:
        program = compile_plan(plan)
        rules = plan.rules.rules
        self.plan = plan
        # Optimizers and scaler are reached weakly once the hooks are on.
        self.options = options._replace(optimizers=None, scaler=None)
        event_log = EventLog(rules, [len(plan.of(rule.id)) for rule in rules])
        recorder = Recorder(Records(), writer, event_log)
        self.context = Context(
            program=program,
            parameters=Parameters(model, program.names),
            counters=StepCounters(len(program.names), options.start_step),
            event_log=event_log,
            recorder=recorder,
            mode=options.mode,
            rules=tuple(rules),
            outside=options.beside,
            scaling=Scaling(options.scaler),
        )
        if options.scaler is not None and options.scaler.is_enabled():
            refuse_scaling(program)
        for rule, text in plan.elsewhere.items():
            event_log.emit("notice", text, rule=rule, step=options.start_step)
        self.controller = Controller(model, self.context, plan, options)
        self._when_removed: Callable[[], None] | None = None
        self.removed = False

    def attach(self, removed: Callable[[], None]) -> None:
        """Put the hooks on; on failure nothing stays. ``removed`` is called once they are off."""
        try:
            self.controller.attach()
            compile_support.begin(self.context.program, self.context.event_log, self.step)
        except BaseException:
            compile_support.end(self.context.program, self.context.event_log, None)
            self.controller.detach()
            raise
        self._when_removed = removed

    @_live.uncollected()
    def remove(self) -> None:
        if not self.removed:
            self.removed = True
            self.context.flags.close()
            self.controller.model.compare(closing=True)
            for rule, due in self.context.event_log.never_fired():
                text = f"{self.controller.why_never(due=due)} until the end"
                self.context.event_log.emit("never-fired", text, rule=rule, step=self.step)
            self._close(at=self.step)

    def discard(self) -> None:
        """Take everything off, the files of the records included: another session takes its place."""
        if not self.removed:
            self.context.recorder.discard()
            self._close()

    def model_gone(self) -> None:
        if not self.removed:
            self._close()

    def _close(self, at: int | None = None) -> None:
        self.removed = True
        compile_support.end(self.context.program, self.context.event_log, at)
        self.context.event_log.settle()
        self.controller.detach()
        self.context.recorder.close()
        if self._when_removed is not None:
            self._when_removed()

    @property
    def step(self) -> int:
        return self.context.counters.latest

    @property
    def events(self) -> list[Event]:
        self.context.event_log.settle(wait=False)
        return list(self.context.event_log.events)

    def status(self, *, wait: bool = True) -> dict[str, RuleStatus]:
        return self.context.event_log.status(wait=wait)

    @property
    def records(self) -> Records:
        self.context.recorder.flush()
        return self.context.recorder.records

    def lookup(self) -> Lookup:
        records = self.records
        measured: dict[str, set[str]] = {}
        for series in records:
            measured.setdefault(series.key.rule, set()).update(series.key.names)
        logged = {
            rule.id: Logged(
                getattr(rule, "stats", ()),
                # A module can return several tensors, which have names of their own.
                frozenset({b.name for b in self.plan.of(rule.id)} | measured.get(rule.id, set())),
            )
            for rule in self.plan.rules.rules
            if isinstance(rule, ObserverRule)
        }
        manifest = self.plan.manifest
        things = [*(param.name for param in manifest.params), *(m.name for m in manifest.modules)]
        more = sorted({name for names in measured.values() for name in names} - set(things))
        named: tuple[Module | Param, ...] = (*manifest.modules, *manifest.params)
        aliases = {alias: thing.name for thing in named for alias in thing.aliases}
        known = (*things, *more)
        return Lookup(known, aliases, logged, records.series, self._due_since)

    def _due_since(self, rule_id: str, name: str, step: int) -> int:
        """Return in how many finished steps of a parameter after one a rule was due, up to some."""
        tensors = self.context.program.names
        if name not in tensors:
            return 0  # a module need not run in every step
        over = self.context.counters[tensors.index(name)].step
        schedule = next(rule.steps for rule in self.plan.rules.rules if rule.id == rule_id)
        last = over if schedule.to is None else min(over, schedule.to)
        due = (one for one in range(last - 1, step, -1) if schedule.due(one))
        return len(list(islice(due, 3)))
