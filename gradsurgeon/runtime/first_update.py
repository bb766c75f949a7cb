"""What an optimizer tells about the rules right before its first update: updates from before, and scales without effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsurgeon.actions import Rule
from gradsurgeon.actions.scale import Scale
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _torch

# Optimizers that divide a gradient by a running size of its own, so a constant factor cancels. Subclasses count, too.
_DIVIDING = frozenset({"Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RMSprop"})
# `torch.distributed.checkpoint` makes the state of a fresh optimizer by one step.
_FRESH = 1
_RESUMED = "{optimizer} has made {updates:,} updates already, and steps count from 0 here{loss}; if this continues a training, {remedy}"
_LOSS = ", so schedules and learned bounds start anew"
_UNDER_RUN = (
    "pass --resume RUN, or --start-step {updates} where the earlier run has no run directory"
)
_UNDER_APPLY = "pass start_step={updates} to apply, or its state to session.load_state_dict"
_CANCELS = (
    "{optimizer} divides each gradient by its running size, so a constant factor of {factor:g} changes next to nothing: give these parameters a "
    "group with a learning rate of their own"
)


def mention(context: Context, effects: Effects, optimizer: Optimizer, counter: StepCounter) -> None:
    """Mention what surprises in an optimizer, given the counter of its updates."""
    if not counter.step:
        updates = _updates_of(optimizer)
        if updates > _FRESH:
            _mention_updates(context, effects, optimizer, updates)
    for effect in effects.on_params("backward", "step"):
        rule = effect.rule
        indices = effect.owned(counter)
        if not indices or not isinstance(rule, Scale) or not _is_constant(rule):
            continue
        params = context.parameters.params(indices)
        if _cancels(optimizer, [param for param in params if param is not None]):
            name = type(optimizer).__name__
            text = _CANCELS.format(optimizer=name, factor=rule.factor)
            context.event_log.notice_once(
                "cancels", text, rule=rule.id, step=counter.step, warn=True
            )


def _updates_of(optimizer: Optimizer) -> int:
    """Return the number of updates that a loaded state counts; 0 without state, or of an optimizer that does not count."""
    for state in getattr(optimizer, "state", {}).values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor):
            if _torch.is_capturing():
                return 0
            # Waits for the device, once: a new optimizer has no state.
            return int(step)
        if isinstance(step, int | float):
            return int(step)
    return 0


def _mention_updates(
    context: Context, effects: Effects, optimizer: Optimizer, updates: int
) -> None:
    remedy = _UNDER_APPLY
    if context.outside:
        remedy = _UNDER_RUN
    loss = ""
    if any(_counts_steps(effect.rule) for effect in effects.all):
        loss = _LOSS
    text = _RESUMED.format(
        optimizer=type(optimizer).__name__,
        updates=updates,
        loss=loss,
        remedy=remedy.format(updates=updates),
    )
    # In a script of its own a session that only looks may begin anywhere: then the event is enough.
    context.event_log.notice_once("resumed", text, warn=context.outside or bool(loss))


def _counts_steps(rule: Rule) -> bool:
    """Tell whether a rule acts by the number of the step, or learns a bound from updates before."""
    return not rule.steps.always or rule.judges_first


def _is_constant(rule: Scale) -> bool:
    # A negative factor turns the update round, and a factor of 0 stops it.
    return rule.steps.always and rule.factor > 0


def _cancels(optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
    """Tell whether a constant factor on these gradients leaves the updates of an optimizer as they are."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names.isdisjoint(_DIVIDING):
        return False
    wanted = set(map(id, params))
    for group in optimizer.param_groups:
        has_any = any(id(param) in wanted for param in group["params"])
        if has_any and _adds_decay(group, names):
            return False
    return True


def _adds_decay(group: dict[str, Any], names: set[str]) -> bool:
    """Tell whether the weights are a part of the gradient that is divided: then a factor changes its direction."""
    is_decoupled = not names.isdisjoint({"AdamW", "Adafactor"}) or group.get(
        "decoupled_weight_decay", False
    )
    return bool(group.get("weight_decay", 0)) and not is_decoupled
