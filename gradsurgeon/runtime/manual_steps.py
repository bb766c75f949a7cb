"""The step point of scripts that have no torch optimizer and update their weights by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.context import SessionOptions
from gradsurgeon.runtime.effect import Effect, WeightUpdate
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.training import Training
from gradsurgeon.tensors import measure

_TICK = "pass optimizer=[] to apply() and call session.tick()"
_NOTICE = f"no torch optimizer owns the parameters: each backward pass counts as a step; else {_TICK} right before each update"
_NO_SKIP = "`then: skip-step` cannot hide gradients from a manual update"
_RAISES = f"{_NO_SKIP}, so it raises: {_TICK}, and update if it returns True"
_COMPOUNDS = (
    "a backward pass reached {name} while a rule at `step` had already edited or learned from its gradient: the effect "
    f"would compound. Clear the gradients after each update, or {_TICK} right before it"
)
_TAKEN_OVER = (
    "an optimizer owns the parameters from now on; the backward passes before it were counted as steps. Rules at `step` "
    "acted on the last gradients, and act on them again in the first update: pass apply(..., optimizer=)"
)
_NO_FREEZE = "weights are updated by hand, so no optimizer can be kept off them; set requires_grad to False, or use `zero`"
_NO_EDIT = "weights are updated by hand, so no rule sees the end of an update; edit the weights in the script, after its update"


class ManualSteps:
    def __init__(
        self,
        training: Training,
        finished: Callable[[WeightUpdate], None],
        options: SessionOptions,
    ) -> None:
        self._training = training
        self._context = training.context
        self._effects = training.effects
        # Counts an attempted update.
        self._finished = finished
        declared = options.optimizers is not None and not options.optimizers
        self._counts: Literal["nothing", "passes", "ticks"] = "ticks" if declared else "nothing"
        # Whether no trap stopped the last update.
        self._goes_on = True

    @property
    def active(self) -> bool:
        return self._counts != "nothing"

    @property
    def declared(self) -> bool:
        return self._counts == "ticks"

    def refuse_compounding(self, done: BackwardPass) -> None:
        """Raise if a pass adds to a gradient that a rule at `step` has edited or learned from."""
        if self.declared or not self._context.acts or self._context.paused:
            return
        held = measure.read(list(done.held.values()))
        held_by_index = dict(zip(done.held, held, strict=True))
        compounded = [index for index in self.edited() if held_by_index.get(index)]
        if compounded:
            name = self._context.names[compounded[0]]
            error = GradSurgeonError(_COMPOUNDS.format(name=name))
            self._context.refusals.refuse(error, [effect.rule.id for effect in self._editing()])

    def edited(self) -> list[int]:
        """Return the tensors that rules at `step` edit or learn from."""
        edited: set[int] = set()
        for effect in self._editing():
            edited.update(effect.indices)
        return sorted(edited)

    def _editing(self) -> list[Effect]:
        editing = []
        for effect in self._effects.on_params("step"):
            if not effect.edits and not effect.judges:
                continue
            if effect.rule.id not in self._context.refusals.resting:
                editing.append(effect)
        return editing

    def _begin(self) -> None:
        """Count passes as steps from now on, with a notice; refuse rules that cannot act on manual updates."""
        self._counts = "passes"
        self._refuse_rules()
        context = self._context
        self._effects.let_skips_warn(_NO_SKIP)
        context.event_log.notice_once("manual", _NOTICE)

    def _refuse_rules(self) -> None:
        freezes = [effect.rule.id for effect in self._effects.on_params("step") if effect.holds]
        self._context.refusals.refuse_rules(freezes, _NO_FREEZE)
        edits = [effect.rule.id for effect in self._effects.on_params("updated") if effect.edits]
        self._context.refusals.refuse_rules(edits, _NO_EDIT)

    def after_pass(self) -> None:
        if not self.active:
            self._begin()
        if self.declared:
            return
        cause = self._update()
        if cause is not None:
            raise replace(cause, text=f"{cause.text}\n({_RAISES})").error()

    def _update(self) -> StopReason | None:
        """Run the rules at `step` and count an update; return why a trap skips it, if one does."""
        step = WeightUpdate(self._context.counters.common, by_hand=True)
        cause = self._training.step_starting(step)
        step.stopped = cause is not None
        self._goes_on = not step.stopped
        step.returned = True
        self._finished(step)
        if cause is not None and not cause.skips:
            raise cause.error()
        self._context.event_log.raise_raised()
        return cause

    def withdraw(self) -> None:
        """Hand the counting to an optimizer. The counted steps stay counted: step numbers stay unique."""
        counter = self._context.counters.common
        if self._counts == "passes":
            warn = bool(self.edited())
            event_log = self._context.event_log
            event_log.notice_once("late", _TAKEN_OVER, step=counter.step, warn=warn)
        self._counts = "nothing"

    def tick(self) -> bool:
        self._refuse_rules()
        counted_passes = self._counts == "passes"
        self._counts = "ticks"
        # The pass before a first tick was already counted and judged; from now on only ticks count.
        if not counted_passes:
            self._update()
        return self._goes_on
