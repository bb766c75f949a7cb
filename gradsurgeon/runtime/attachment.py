"""A plan attached to a model: what the registry and the launcher deal with, and a `Session` shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.actions import CaptureRule, ObserverRule
from gradsurgeon.compiler import compile_plan
from gradsurgeon.errors import GradSurgeonError, did_you_mean
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.planning import Plan
from gradsurgeon.runtime.captured_tensors import CaptureKey
from gradsurgeon.runtime.compile_support import CompileSupport
from gradsurgeon.runtime.context import Context, Mode
from gradsurgeon.runtime.controller import Controller
from gradsurgeon.runtime.event_log import EventLog
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.recorder import Recorder
from gradsurgeon.runtime.scaler_watch import Scaling, refuse_scaling
from gradsurgeon.runtime.step_counter import StepCounters
from gradsurgeon.store import Logged, Lookup, Records

if TYPE_CHECKING:
    from gradsurgeon.store.writer import RunWriter

_TEMPORARY = (
    "the session is over already, because nobody holds the model that rules were applied to: keep a "
    "reference to the model (model = ...; session = gradsurgeon.apply(model, rules))"
)
_PACKAGE = str(Path(__file__).parents[1])


def _calls() -> Iterator[tuple[CodeType, int]]:
    """Yield the calls under way outside of this package, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # documented
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            yield frame.f_code, frame.f_lasti
        frame = frame.f_back


class Attachment:
    """Rules acting on one model, until `remove()`. It reaches the model weakly, and lives as long."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        optimizers: Sequence[Optimizer] | None,
        mode: Mode,
        start_step: int,
        writer: RunWriter | None = None,
        scaler: GradScaler | None = None,
        outside: bool = False,
        provisional: bool = False,
    ) -> None:
        program = compile_plan(plan)
        rules = plan.rules.rules
        self.plan = plan
        self._records = Records()
        event_log = EventLog(rules, [len(plan.of(rule.id)) for rule in rules])
        recorder = Recorder(self._records, writer, event_log)
        self._context = Context(
            program=program,
            parameters=Parameters(model, program.names),
            counters=StepCounters(len(program.names), start_step),
            event_log=event_log,
            recorder=recorder,
            mode=mode,
            rules=tuple(rules),
            outside=outside,
            scaling=Scaling(scaler),
        )
        if scaler is not None and scaler.is_enabled():
            refuse_scaling(program)
        for rule, text in plan.elsewhere.items():
            event_log.emit("notice", text, rule=rule, step=start_step)
        self._compiled = CompileSupport(program, event_log, model)
        self.controller = Controller(
            model, self._context, plan, optimizers, provisional=provisional
        )
        recorder.late = self.controller.settle
        self._aliases = {
            alias: param.name for param in plan.manifest.params for alias in param.aliases
        }
        self._made_in = next(_calls(), None)
        self._when_removed: Callable[[], None] | None = None
        self._removed = False

    def attach(self, removed: Callable[[], None]) -> None:
        """Put the hooks on; on failure nothing stays. ``removed`` is called once they are off."""
        self.controller.attach()
        try:
            self._compiled.attach(self.step)
        except BaseException:
            self._compiled.detach(None)
            self.controller.detach()
            raise
        self._when_removed = removed

    def remove(self) -> None:
        """Take everything off the model and its optimizers. Records and events stay readable."""
        if not self._removed:
            self._removed = True
            self._context.flags.close()
            self.controller.model.compare(closing=True)
            for rule, due in self._context.event_log.never_fired():
                text = f"{self.controller.why_never(due=due)} until the end"
                self._context.event_log.emit("never-fired", text, rule=rule, step=self.step)
            self._compiled.detach(self.step)
            self._close()

    def discard(self) -> None:
        """Take everything off, the files of the records included: another session takes its place."""
        if not self._removed:
            self._context.recorder.discard()
            self._let_go()

    def model_gone(self) -> None:
        """Let go of everything that belonged to the model, and say so where it has not lived at all."""
        if not self._removed:
            if self.controller.manual.provisional:
                self._context.recorder.discard()
            self._let_go()
            if self._is_temporary():
                self._context.event_log.emit("notice", _TEMPORARY, step=self.step, warn=True)

    def _is_temporary(self) -> bool:
        """Tell whether the model has gone while the call that put rules on it was still under way."""
        return any(call == self._made_in for call in _calls())

    def _let_go(self) -> None:
        self._removed = True
        self._compiled.detach(None)
        self._close()

    def _close(self) -> None:
        self._settle()
        self.controller.detach()
        self._context.recorder.flush()
        self._context.recorder.close()
        if self._when_removed is not None:
            self._when_removed()

    @property
    def removed(self) -> bool:
        return self._removed

    @property
    def mode(self) -> Mode:
        return self._context.mode

    @property
    def paused(self) -> bool:
        return self._context.paused

    def pause(self) -> None:
        """Let no rule act until `resume()`; the clocks go on."""
        self._context.paused = True

    def resume(self) -> None:
        """Let the rules act again."""
        if not self._removed:
            self._context.paused = False

    @property
    def start_step(self) -> int:
        return self._context.counters.start

    @property
    def step(self) -> int:
        """The largest clock: the number of the next update, from ``start_step``."""
        return self._context.counters.latest

    def tick(self) -> bool:
        """Mark one update of a script without torch optimizer, right before it happens.

        Returns:
            Whether to update: ``False`` where a trap with ``then: skip-step`` tripped.

        Raises:
            NonFiniteGradientError: a trap stops the update.
            GradSurgeonError: a torch optimizer owns the parameters; its steps count by themselves.
        """
        if self.controller.steps.owned:
            raise GradSurgeonError(
                "tick() marks updates that are written by hand, but a torch optimizer owns the "
                "parameters and its steps are counted by themselves: remove the call"
            )
        return self._removed or self.controller.manual.tick()

    def name_model(self, title: str) -> None:
        """Let messages of traps say which model they are about: there are several."""
        self._context.title = title

    def again(self) -> None:
        """Let the next backward pass take the place of the last: nothing was updated in between."""
        self.controller.manual.again()

    def confirm(self) -> None:
        """Take notice that weights are updated by hand, where that was not certain.

        Raises:
            GradSurgeonError: the rules cannot act on such updates, or not on these.
        """
        self.controller.manual.confirm()

    @property
    def events(self) -> list[Event]:
        """What happened so far, oldest first, without waiting for what a device has not told yet."""
        self._settle(wait=False)
        return list(self._context.event_log.events)

    def status(self, *, wait: bool = True) -> dict[str, RuleStatus]:
        """Return what each rule has done so far.

        Args:
            wait: for the device. Otherwise what it has counted is a moment old.
        """
        self.controller.settle(wait=wait)
        return self._context.event_log.status(wait=wait)

    def _settle(self, *, wait: bool = True) -> None:
        self.controller.settle(wait=wait)
        self._context.event_log.settle(wait=wait)

    @property
    def records(self) -> Records:
        """Everything measured so far. Waits for the device."""
        self._context.recorder.flush()
        return self._records

    def captured(self, rule: str) -> dict[CaptureKey, Tensor]:
        """Return what a `capture` rule has kept, oldest first.

        Args:
            rule: id of the rule.

        Returns:
            Detached copies by ``(name, step, call)``; ``call`` counts from 0 within a step.

        Raises:
            KeyError: no `capture` rule has this id.
        """
        known = [one.id for one in self.plan.rules.rules if isinstance(one, CaptureRule)]
        if rule not in known:
            hint = did_you_mean(rule, known) or f"there are: {', '.join(known) or 'none'}"
            raise KeyError(f"no capture rule {rule!r}; {hint}")
        return self._context.captures.of(rule)

    def lookup(self) -> Lookup:
        """Return the records by name or alias. Waits for the device."""
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
        known = (*things, *more)
        return Lookup(known, self._aliases, logged, records.series, self._due_since)

    def _due_since(self, rule_id: str, name: str, step: int) -> int:
        """Return in how many finished steps of a parameter after one a rule was due, up to some."""
        tensors = self._context.program.names
        if name not in tensors:
            return 0  # a module need not run in every step
        over = self._context.counters[tensors.index(name)].step
        schedule = next(rule.steps for rule in self.plan.rules.rules if rule.id == rule_id)
        last = over if schedule.to is None else min(over, schedule.to)
        due = (one for one in range(last - 1, step, -1) if schedule.due(one))
        return len(list(islice(due, 3)))

    def meet(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that is about to step."""
        self.controller.steps.meet(optimizer)
