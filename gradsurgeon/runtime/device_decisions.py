"""Updates that the device decides on: the host reads each decision right before the next update, and reports it then."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.errors import to_stderr
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.forensics.written_since import Witness
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_outcome import DeviceOutcome
from gradsurgeon.runtime.device_policy import MAKES_STATE, WAITS, is_on_device, reason_to_wait
from gradsurgeon.runtime.effect import Due
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.running_steps import RunningStep, lent_flags, params_of
from gradsurgeon.runtime.scaler_skips import judge_skip
from gradsurgeon.runtime.step_diagnosis import Tripped
from gradsurgeon.runtime.traps import Looks, Traps
from gradsurgeon.runtime.update import Judged, JudgedUpdate
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.measure import as_dict
from gradsurgeon.tensors.sent_norms import SentNorms, as_norms


@dataclass(slots=True, eq=False)
class _Pending:
    """One decision of the device that the host does not know yet."""

    update: Judged
    due: Due
    looks: Looks
    outcome: DeviceOutcome
    tripped: Tripped
    numbers: SentNorms
    witness: Witness | None = None


class DeviceDecisions:
    """At most one decision of a device, between the update that it is about and the next one."""

    def __init__(self, context: Context, effects: Effects, traps: Traps, kept: KeptCalls) -> None:
        self.context = context
        self._effects = effects
        self._traps = traps
        self._kept = kept
        self._pending: _Pending | None = None
        self._at_exit: Callable[[], None] | None = None
        # Whether to say why a trap waits in each step.
        self._looks_for_waits = not context.refusals.lenient

    def begin(self, optimizer: Optimizer, update: RunningStep) -> bool:
        """Note who decides on an update; return whether it is known that a `GradScaler` skips it."""
        update.outcome = None
        update.unread = None
        # A fused optimizer gets scaled gradients and the overflow flag of the scaler.
        update.scale = getattr(optimizer, "grad_scale", None)
        flag = getattr(optimizer, "found_inf", None)
        lent = lent_flags(optimizer)
        overflow = lent[0].of_scaler if lent else flag
        loss_scale = self.context.scaling.scale_of_step(optimizer)
        if loss_scale is None:
            overflow = None
        judges = update.due.may_object
        decides = judges and self._decides(optimizer, update)
        update.is_voted_on = not (decides or update.due.is_left_to_device)
        update.due.is_left_to_device = decides
        if decides:
            # The flag of another session, or one that the script has set without a `GradScaler`.
            others = flag if lent or loss_scale is None else None
            update.outcome = DeviceOutcome(overflow, loss_scale, others, for_traps=True)
        elif lent and bool(lent[-1].value):
            if overflow is not None and bool(overflow):
                update.overflowed = loss_scale
            else:
                # Another session leaves the update out: this one finds no gradient, as where the other one had waited.
                update.hide(optimizer, params_of(optimizer))
        elif overflow is None:
            return False
        elif judges:
            update.unread = DeviceOutcome(overflow, loss_scale)
        elif _torch.is_host(overflow) or any(each.effect.asks_host for each in update.due.bound):
            if bool(overflow):
                update.overflowed = loss_scale
        else:
            # The optimizer checks the flag of the scaler itself, on the device.
            update.outcome = DeviceOutcome(overflow, loss_scale)
            self._note(Judged(update.counter), update.due, {}, update.outcome)
        return update.overflowed is not None

    def _decides(self, optimizer: Optimizer, update: RunningStep) -> bool:
        """Return whether the device decides in the place of traps; say once why not, unless nobody chose the rules."""
        groups = getattr(optimizer, "param_groups", ())
        is_fused = any(group.get("fused") for group in groups)
        if not (is_fused or self._looks_for_waits):
            # Nearly always nothing else is to be asked.
            return False
        reason = reason_to_wait(optimizer, update, self._effects, self._traps.passes)
        if self._looks_for_waits and reason not in ("", MAKES_STATE):
            self._looks_for_waits = False
            if is_on_device(optimizer):
                step = update.counter.step
                self.context.event_log.notice_once("waits", WAITS + reason, step=step)
        return not reason

    def decide(self, update: JudgedUpdate, due: Due, outcome: DeviceOutcome, looks: Looks) -> None:
        """Pass the objections of traps to the device, which decides on an update. Does not wait for it."""
        late_update = update.without_gradients()
        objections = []
        for bound, norms in looks.items():
            objections.append(bound.effect.objection(late_update, bound, norms))
        outcome.decide(objections)
        self._note(late_update, due, looks, outcome)

    def _note(self, update: Judged, due: Due, looks: Looks, outcome: DeviceOutcome) -> None:
        # Another thread may have left a decision since this step began.
        self.settle()
        scale = self._traps.passes.scale(update.counter)
        if scale is not None:
            # The scaler changes its tensor.
            scale = scale.clone()
        kept = self._kept
        tripped = Tripped(update.step, kept.hold(), tuple(kept.sample_ids), scale)
        flags = [outcome.left_out]
        if outcome.overflow is not None:
            flags.append(outcome.overflow)
        numbers = SentNorms([as_norms(flags), update.magnitudes, *looks.values()])
        self._pending = _Pending(update, due, looks, outcome, tripped, numbers)
        if self._at_exit is None and not self.context.outside:
            self._at_exit = atexit.register(partial(_end, weakref.ref(self)))

    def updated(self) -> None:
        """Remember the weights and inputs that a replay of the update would read."""
        pending = self._pending
        if pending is not None and pending.witness is None and self._traps.keeps_calls:
            pending.witness = Witness(self._read_by(pending))

    def _read_by(self, pending: _Pending) -> dict[str, Tensor]:
        """Return what a replay reads, by name: weights and inputs."""
        context = self.context
        weights = context.parameters.present_by_index(range(len(context.names)))
        by_name = {context.names[index]: param for index, param in weights}
        return by_name | pending.tripped.kept.inputs

    def _written(self, pending: _Pending) -> Sequence[str]:
        if pending.witness is None:
            return ()
        return pending.witness.written(self._read_by(pending))

    def close(self) -> None:
        """Forget a decision that nobody can read any more."""
        self._pending = None
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None

    def settle(self, *, limit: float = 0.0) -> None:
        """Read the pending decision, and report it; an error waits in the event log. Waits for the device.

        The host reads it before the next update, and when somebody asks what the session has done, or ends it. Only before
        an update are other ranks there, for which it waits ``limit`` seconds if a trap has tripped.
        """
        pending = self._pending
        if pending is None or _torch.is_capturing():
            return
        self._pending = None
        counter = pending.update.counter
        self._kept.end_held()
        tripped = replace(
            pending.tripped, told_at=counter.step, written=partial(self._written, pending)
        )
        try:
            cause = self._concluded(pending, tripped, limit)
        finally:
            self._kept.release()
        counter.end_row()
        if cause is not None and not cause.skips:
            self.context.event_log.raised.append(cause.error())

    def _concluded(self, pending: _Pending, tripped: Tripped, limit: float) -> StopReason | None:
        update = pending.update
        outcome = pending.outcome
        flags, update.magnitudes, *norms = pending.numbers.read()
        left_out, *overflow = as_dict(flags).values()
        overflowed = any(overflow)
        outcome.tell(overflowed=overflowed, left_out=left_out > 0)
        if outcome.loss_scale is not None and overflowed:
            scale = outcome.loss_scale
            return judge_skip(self._traps.conclusions, update, pending.due, scale, tripped)
        looks = dict(zip(pending.looks, norms, strict=True))
        return self._traps.conclude_late(update, looks, tripped, limit)


def _end(reference: weakref.ref[DeviceDecisions]) -> None:
    """Read the last decision at the end of a process whose script did not remove the session."""
    device = reference()
    if device is None:
        return
    device.settle()
    for error in device.context.event_log.take_raised():
        to_stderr(str(error))
