"""What an optimizer tells about the rules right before its first update: updates from before, and scales without effect."""

from __future__ import annotations

from contextlib import suppress

from torch.optim import Optimizer

from gradsurgeon.actions.scale import IN_ITS_PLACE, Scale
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.running_steps import params_of
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _torch

# They divide a gradient by a running size of its own, in which a constant factor cancels.
_DIVIDING = frozenset({"Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RMSprop"})
# Weight decay that is a part of the gradient keeps its size, so the direction changes. In these it never is.
_DECOUPLED = frozenset({"Adafactor", "AdamW"})
_CANCELS = (
    "{optimizer} divides each gradient by its running size, so a constant factor of {factor:g} changes next to nothing: "
    f"{IN_ITS_PLACE}"
)
_RESUMED = "{optimizer} has made {updates} updates already, and steps count from 0 here{loss}; if this continues a training, {remedy}"
_LOSS = ", so schedules and learned bounds start anew"
_UNDER_RUN = (
    "pass --resume RUN, or --start-step {updates} where the earlier run has no run directory"
)
_UNDER_APPLY = "pass start_step={updates} to apply, or its state to session.load_state_dict"


def mention(context: Context, effects: Effects, optimizer: Optimizer, counter: StepCounter) -> None:
    """Mention what surprises in an optimizer, given the counter of its updates; under `run` with a line."""
    mention_scales(context, effects, optimizer)
    updates = _updates_of(optimizer)
    if counter.step or not updates:
        return
    loss = ""
    for effect in effects.all:
        # It acts by the number of the step, or learns a bound from updates before.
        if not effect.rule.steps.always or effect.rule.judges_first:
            loss = _LOSS
    remedy = _UNDER_APPLY
    if context.outside:
        remedy = _UNDER_RUN
    remedy = remedy.format(updates=updates)
    name = type(optimizer).__name__
    text = _RESUMED.format(optimizer=name, updates=updates, loss=loss, remedy=remedy)
    # A session that only looks may begin anywhere: the event is enough.
    context.event_log.notice_once("resumed", text, warn=context.outside or bool(loss))


def _updates_of(optimizer: Optimizer) -> str:
    """Return the updates that a loaded state counts, `N` if it counts none, empty if there are none. Waits for the device."""
    if _torch.is_capturing():
        return ""
    with suppress(Exception):  # a fresh optimizer has no state
        state = next(iter(optimizer.state.values()))
        # `torch.distributed.checkpoint` makes the state of a fresh optimizer by one step on gradients of 0.
        if "step" in state and state["step"] > 1:
            return str(int(state["step"]))
        if "step" not in state and state["momentum_buffer"].any():
            return "N"
    return ""


def mention_scales(context: Context, effects: Effects, optimizer: Optimizer) -> None:
    """Mention scales that change nothing, because an optimizer cancels them."""
    owned = context.parameters.owned(params_of(optimizer))
    for effect in effects.on_params("backward", "step"):
        rule = effect.rule
        if not isinstance(rule, Scale) or set(owned).isdisjoint(effect.indices):
            continue
        if _cancels(rule, optimizer):
            text = _CANCELS.format(optimizer=type(optimizer).__name__, factor=rule.factor)
            context.event_log.notice_once("cancels", text, rule=rule.id, warn=context.outside)


def _cancels(rule: Scale, optimizer: Optimizer) -> bool:
    if not rule.may_be_cancelled:
        return False
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names.isdisjoint(_DIVIDING):
        return False
    for group in optimizer.param_groups:
        is_decoupled = group.get("decoupled_weight_decay") or not names.isdisjoint(_DECOUPLED)
        if group.get("weight_decay") and not is_decoupled:
            return False
    return True
