"""What an optimizer tells about the rules right before its first update: updates from before, and scales without effect."""

from __future__ import annotations

from contextlib import suppress

from torch.optim import Optimizer

from gradsurgeon.actions import Rule
from gradsurgeon.actions._ramps import ends
from gradsurgeon.actions.scale import Scale
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
    "{optimizer} divides each gradient by its running size, so a constant factor of {factor:g} changes next to nothing: give these "
    "parameters a group with a learning rate of their own"
)
_RESUMED = "{optimizer} has made {updates:,} updates already, and steps count from 0 here{loss}; if this continues a training, {remedy}"
_LOSS = ", so schedules and learned bounds start anew"
_UNDER_RUN = (
    "pass --resume RUN, or --start-step {updates} where the earlier run has no run directory"
)
_UNDER_APPLY = "pass start_step={updates} to apply, or its state to session.load_state_dict"


def mention(context: Context, effects: Effects, optimizer: Optimizer, counter: StepCounter) -> None:
    """Mention what surprises in an optimizer, given the counter of its updates; under `run` with a line."""
    updates = _updates_of(optimizer)
    # `torch.distributed.checkpoint` makes the state of a fresh optimizer by one step.
    if updates > 1 and not counter.step:
        loss = ""
        if any(_counts_steps(effect.rule) for effect in effects.all):
            loss = _LOSS
        remedy = _UNDER_RUN if context.outside else _UNDER_APPLY
        remedy = remedy.format(updates=updates)
        name = type(optimizer).__name__
        text = _RESUMED.format(optimizer=name, updates=updates, loss=loss, remedy=remedy)
        # A session that only looks may begin anywhere: the event is enough.
        context.event_log.notice_once("resumed", text, warn=context.outside or bool(loss))
    mention_scales(context, effects, optimizer)


def mention_scales(context: Context, effects: Effects, optimizer: Optimizer) -> None:
    """Mention scales that change nothing, because an optimizer cancels them."""
    owned = context.parameters.owned(params_of(optimizer))
    for effect in effects.on_params("backward", "step"):
        rule = effect.rule
        if not isinstance(rule, Scale) or not set(owned).intersection(effect.indices):
            continue
        if _cancels(rule, optimizer):
            text = _CANCELS.format(optimizer=type(optimizer).__name__, factor=rule.factor)
            step = context.counters.latest
            context.event_log.notice_once(
                "cancels", text, rule=rule.id, step=step, warn=context.outside
            )


def _updates_of(optimizer: Optimizer) -> int:
    """Return the updates that a loaded state counts, 0 without one. Waits for the device once: a fresh optimizer has no state."""
    if not _torch.is_capturing():
        with suppress(Exception):  # not every optimizer counts
            state = next(iter(optimizer.state.values()))
            return int(state["step"])
    return 0


def _counts_steps(rule: Rule) -> bool:
    """Tell whether a rule acts by the number of the step, or learns a bound from updates before."""
    return not rule.steps.always or rule.judges_first


def _cancels(rule: Scale, optimizer: Optimizer) -> bool:
    # A negative factor turns the update round, and a factor of 0 stops it.
    # A ramp changes the updates while it lasts.
    if rule.ramps or min(ends(rule.factor)) <= 0 or not rule.steps.always:
        return False
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names.isdisjoint(_DIVIDING):
        return False
    for group in optimizer.param_groups:
        is_decoupled = group.get("decoupled_weight_decay") or not names.isdisjoint(_DECOUPLED)
        if group.get("weight_decay") and not is_decoupled:
            return False
    return True
