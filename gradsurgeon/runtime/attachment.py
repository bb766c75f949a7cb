"""A plan attached to a model: the object behind a `Session`, used by the registry and the launcher."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import nn

from gradsurgeon.actions.clip_norm import BOTH_FORMS, BY_ITSELF, clips_by_themselves
from gradsurgeon.common import _live
from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.errors import printable
from gradsurgeon.language.planning import Plan, unwrapped
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.records.store import Records
from gradsurgeon.runtime import session_state
from gradsurgeon.runtime.context import Context, SessionOptions
from gradsurgeon.runtime.controller import Controller
from gradsurgeon.runtime.device_policy import with_decisions
from gradsurgeon.runtime.scaler_watch import refuse_scaling
from gradsurgeon.tensors import _torch

if TYPE_CHECKING:
    from gradsurgeon.records.delivery import Delivery
    from gradsurgeon.records.store.writer import RunWriter

_RECOMPILED = (
    "the rules on modules ({rules}) came after the first compiled call: gradsurgeon dropped all compiled code of this process, which "
    "torch.compile compiles again; to compile only once, apply the rules before the first call"
)
_COMPILED_AGAIN = "the rules on modules are gone: gradsurgeon dropped all compiled code, which torch.compile compiles again"


class Attachment:
    """Rules that act on one model until `remove()`. It refers to the model weakly and lives as long as its modules."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        options: SessionOptions,
        writer: RunWriter | None = None,
        sinks: Sequence[Delivery] = (),
    ) -> None:
        matched = [len(plan.of(rule.id)) for rule in plan.rules.rules]
        event_log = EventLog(plan.rules.rules, matched, options.on_event, options.say)
        event_log.now = lambda: self.step
        recorder = Recorder(
            Records(),
            event_log,
            writer,
            sinks,
            step=lambda: self.step,
            write_state=lambda path: session_state.write_file(path, self.controller),
            pending=self.pending_steps,
        )
        self.context = Context(model, plan, options, event_log, recorder)
        self.plan = with_decisions(plan, self.context, options.optimizers)
        self.context.refusals.refuse_complaints(plan.refused)
        for rule, text in plan.elsewhere.items():
            event_log.emit("notice", text, rule=rule, step=options.start_step)
        self.controller = Controller(unwrapped(model), self.context, plan, options)
        if options.scaler is not None and options.scaler.is_enabled():
            refuse_scaling(self.controller.effects.before_scaler)
        self.model = weakref.ref(model)
        self.removed = False
        self._when_removed: Callable[[], None] | None = None
        # Finalizers of the modules with parameters that outlived the model.
        self._owners: dict[int, weakref.finalize[..., nn.Module]] = {}

    def pending_steps(self) -> dict[str, int]:
        """Return the number of the next update of each parameter whose optimizer has begun: records of it wait for it."""
        pending = {}
        for index, name in enumerate(self.context.names):
            counter = self.context.counters[index]
            if counter.begun:
                pending[name] = counter.step
        return pending

    def attach(self, removed: Callable[[], None]) -> None:
        """Install the hooks, or leave nothing if that fails. ``removed`` is called once the hooks are off."""
        try:
            if not self.context.refusals.over:
                self._install()
        except BaseException:
            self.controller.detach()
            raise
        self._when_removed = removed

    def _install(self) -> None:
        self.controller.attach()
        # Once is enough, and under `run` the header says it.
        for rule in clips_by_themselves(self.plan.rules.rules)[:1]:
            if not self.context.outside:
                text = f"{BY_ITSELF}: {BOTH_FORMS}"
                self.context.event_log.emit("notice", text, rule=rule.id, warn=True)
        # No public interface lists the modules that compiled code calls, so all compiled code must go.
        effects = self.controller.effects
        if effects.modules and _torch.forget_compiled_code():
            rules = [site.rule.id for site in effects.sites if site.rule.target == "modules"]
            text = _RECOMPILED.format(rules=", ".join(rules))
            self.context.event_log.emit("notice", text, warn=True)

    @_live.uncollected()
    def remove(self, error: BaseException | None = None) -> None:
        """Take everything off; an exception that ends the script is known to the caller, or being handled."""
        if self.removed:
            return
        self.removed = True
        try:
            self.context.recorder.collect(self._read_devices)
            if not self.context.refusals.over:
                self._report_end(error)
        finally:  # also if the script turns a warning into an error
            self._close(error)

    def end(self) -> None:
        """Take everything off, then raise an error that was kept; an exception that is being handled gets it as a note."""
        self.remove()
        handled = sys.exc_info()[1]
        if handled is None:
            self.context.event_log.raise_raised()
        for error in self.context.event_log.take_raised():
            assert handled is not None  # noqa: S101 # the error would have been raised
            handled.add_note(str(error))

    def settle(self, *, raises: bool = False) -> None:
        """Read what a device has decided on the last update, and raise the error of a trap, or keep it."""
        self.controller.training.device.settle()
        if raises:
            self.context.event_log.raise_raised()

    def _read_devices(self) -> None:
        self.settle()
        for trap in self.controller.effects.tensor_traps:
            trap.mention_all()

    def _report_end(self, error: BaseException | None) -> None:
        context = self.context
        self.controller.model.compare(closing=True)
        never = []
        for rule_id, due, cause in context.event_log.never_fired():
            never.append((rule_id, self._why_never(due, cause)))
        for rule, loss in self.controller.losses.never_given():
            text = f"no call of gradsurgeon.backward gave the loss {printable(loss)}"
            never.append((rule.id, text))
        is_failing = error is not None or sys.exc_info()[1] is not None
        warn = self.controller.is_idle and not is_failing
        for rule_id, text in never:
            context.event_log.emit("never-fired", text, rule=rule_id, warn=warn)
        # Torch gave up on compiling loops around a graph break, and does not retry without this.
        if self.controller.effects.modules and _torch.forget_compiled_code():
            context.event_log.emit("notice", _COMPILED_AGAIN)

    def _why_never(self, due: int, cause: str) -> str:
        """Return the final message on a rule that never fired, though it was due in some steps."""
        if due:
            reason = f": {cause}" if cause else ""
            return f"was due in {due} steps and never fired{reason}"
        if self.controller.updates:
            return "was never due in an update that took place"
        return "never fired: no optimizer that owns its parameters stepped while their gradients were there"

    def remove_with_records(self) -> None:
        """Remove everything, also the record files: another session takes the place of this session."""
        if not self.removed:
            self.context.recorder.discard()
            self._close()

    def model_gone(self) -> None:
        """Continue until the last module with parameters is gone; all of them may be dying with the model."""
        with self.context.refusals:
            self._outlive()

    def _outlive(self) -> None:
        owners = [module for module in self.controller.model.modules if module._parameters]  # noqa: SLF001 # where torch keeps them
        for owner in owners:
            finalizer = weakref.finalize(owner, self._owner_gone, id(owner))
            finalizer.atexit = False
            self._owners[id(owner)] = finalizer
        if not owners:
            self._close()

    def _owner_gone(self, owner: int) -> None:
        self._owners.pop(owner, None)
        if not self._owners and not self.removed:
            with self.context.refusals:
                self._close()

    def _close(self, error: BaseException | None = None) -> None:
        self.removed = True
        for owner in self._owners.values():
            owner.detach()
        # An exit stack runs every callback, last to first, even if Ctrl-C interrupts one of them.
        with ExitStack() as stack:
            if self._when_removed is not None:
                stack.callback(self._when_removed)
            log = self.context.event_log
            close = self.context.recorder.close
            stack.callback(lambda: close(error or sys.exc_info()[1] or log.last_trap))
            stack.callback(self.controller.detach)
            self.context.recorder.collect(self.settle)
            with self.context.refusals:
                self.controller.effects.conclude()

    @property
    def step(self) -> int:
        return self.context.counters.latest

    @property
    def events(self) -> list[Event]:
        self.context.event_log.read_devices(wait=False)
        return list(self.context.event_log.events)

    def status(self, *, wait: bool = True) -> dict[str, RuleStatus]:
        if wait:
            self.settle()
        return self.context.event_log.status(wait=wait)

    @property
    def records(self) -> Records:
        self.context.recorder.flush()
        return self.context.recorder.records
