"""The state from which a session resumes: the clocks, and the learnt state of rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradsurgeon.errors import GradSurgeonError, printable, shorten_names
from gradsurgeon.runtime.state_form import SessionState, checked

if TYPE_CHECKING:
    from gradsurgeon.runtime.controller import Controller

VERSION = 1
_KEYS = {"version", "step", "common_step", "steps", "in_a_row", "rules"}
_NOT_OURS = "this is not the state of a session: `session.state_dict()` makes one"
_NEWER = (
    "the state is of version {version}, and this gradsurgeon reads version 1: update gradsurgeon"
)


def state_dict(controller: Controller) -> dict[str, Any]:
    """Return the state of a session as plain tensors, numbers and texts. Waits for the device."""
    context = controller.context
    names, counters = context.program.names, context.counters
    return {
        "version": VERSION,
        "step": counters.latest,
        "common_step": counters.common.step,
        "steps": {name: counters[tensor].step for tensor, name in enumerate(names)},
        "shapes": _shapes(controller),
        "in_a_row": controller.traps.rows.by_name(controller.context.program.names),
        "rules": controller.spikes.state(),
    }


def load_state_dict(controller: Controller, state: Any, *, step: int | None = None) -> int:
    """Resume a session from a state, and report mismatches; return the step of the state.

    Args:
        controller: the controller of the session.
        state: the result of `state_dict`.
        step: the number of the next update of every optimizer, if it differs from the state.

    Raises:
        GradSurgeonError: the state is not of a session, is damaged, or is of a newer version; nothing has
            changed then.
    """
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        raise GradSurgeonError(_NOT_OURS)
    if state["version"] != VERSION:
        raise GradSurgeonError(_NEWER.format(version=printable(str(state["version"]))))
    bounds = [spikes.bound for spikes in controller.context.spikes.values()]
    sound = checked(state, {bound.name: bound.rows for bound in bounds})
    end = sound.step
    if step is not None:
        sound = replace(sound, step=step, common_step=step, steps=dict.fromkeys(sound.steps, step))
    complaints = list(_resume(controller, sound))
    event_log, latest = controller.context.event_log, controller.context.counters.latest
    for rule, text in complaints:
        event_log.emit("notice", text, rule=rule, step=latest, warn=True)
    return end


def _shapes(controller: Controller) -> dict[str, list[int]]:
    context = controller.context
    named = zip(context.program.names, context.parameters.params(), strict=True)
    # The shape of a sharded parameter is the shape of the whole.
    return {name: list(param.shape) for name, param in named if param is not None}


def _resume(controller: Controller, state: SessionState) -> Iterator[tuple[str, str]]:
    """Resume from a state; yield each mismatch, with its rule if it concerns one."""
    context = controller.context
    index = {name: tensor for tensor, name in enumerate(context.program.names)}
    steps = {index[name]: step for name, step in state.steps.items() if name in index}
    context.counters.resume(steps, common=state.common_step, latest=state.step)
    controller.traps.rows.resume(state.in_a_row, index)
    yield from _other_names(index, state)
    shapes = _shapes(controller)
    reshaped = {n for n, shape in state.shapes.items() if shapes.get(n, shape) != shape}
    yield from controller.spikes.load(state.rules, index, reshaped)


def _other_names(index: Mapping[str, int], state: SessionState) -> Iterator[tuple[str, str]]:
    if gone := [name for name in state.steps if name not in index]:
        yield "", f"the state knows {shorten_names(gone)}, which this model does not have: ignored"
    if new := [name for name in index if name not in state.steps]:
        text = "which the state does not have: rules restart what they learn of them"
        yield "", f"the model has {shorten_names(new)}, {text}"
