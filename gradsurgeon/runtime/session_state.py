"""The state from which a session resumes, the clocks and the learnt state of rules: built, checked, and saved."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from gradsurgeon.errors import GradSurgeonError, printable, shorten_names
from gradsurgeon.records.store.files import replacing
from gradsurgeon.records.store.layout import state_name
from gradsurgeon.runtime.running_norms import CheckedLearntByRule
from gradsurgeon.runtime.spike_effect import SpikeEffect
from gradsurgeon.tensors import _bounded_load, _dist

if TYPE_CHECKING:
    from gradsurgeon.runtime.controller import Controller

_VERSION = 1
_KEYS = {"version", "step", "common_step", "steps", "shapes", "rules"}
_MOST_BYTES = 2**30
_NOT_OURS = "this is not the state of a session: `session.state_dict()` makes one"
_NEWER = (
    "the state is of version {version}, and this gradsurgeon reads version 1: update gradsurgeon"
)
_RESTART = "the state is damaged: resume from another one, or from none, and the rules restart what they learn"
_UNREADABLE = "resume from another file, or remove this one: then the rules restart what they learn"

_Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class _State:
    step: _Count
    common_step: _Count
    steps: dict[str, _Count]
    rules: dict[str, CheckedLearntByRule]
    # The shapes of parameters, by name.
    shapes: dict[str, list[_Count]]


_FORM = TypeAdapter(_State)


def state_dict(controller: Controller) -> dict[str, Any]:
    """Return the state of a session as plain tensors, numbers and texts. Waits for the device."""
    context = controller.context
    names = context.names
    counters = context.counters
    return {
        "version": _VERSION,
        "step": counters.latest,
        "common_step": counters.common.step,
        "steps": {name: counters[index].step for index, name in enumerate(names)},
        "shapes": _shapes(controller),
        "rules": {trap.rule.id: trap.state() for trap in _learning(controller)},
    }


def load_state_dict(controller: Controller, state: Any, *, step: int | None = None) -> int:
    """Resume a session from the result of `state_dict`, at another step if one is given; return the step of the state.

    Raises:
        GradSurgeonError: this is not the state of a session, or it is damaged; nothing has changed then.
    """
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        raise GradSurgeonError(_NOT_OURS)
    if state["version"] != _VERSION:
        raise GradSurgeonError(_NEWER.format(version=printable(str(state["version"]))))
    context = controller.context
    rows = {}
    for trap in _learning(controller):
        bound = trap.compiled.bound
        rows[bound.name] = bound.rows
    try:
        sound = _FORM.validate_python(dict(state), context=rows)
    except ValidationError as error:
        flaw = error.errors(include_url=False)[0]
        place = "".join(f"[{part!r}]" for part in flaw["loc"])
        text = f"state{place}: {flaw['msg']}"
        raise GradSurgeonError(f"{printable(text)}; {_RESTART}") from None
    end = sound.step
    if step is not None:
        sound = replace(sound, step=step, common_step=step, steps=dict.fromkeys(sound.steps, step))
    # A trap needs what it has learnt so far to judge the last update.
    controller.training.device.settle()
    mismatches = list(_resume(controller, sound))
    for rule, text in mismatches:
        context.event_log.emit("notice", text, rule=rule, warn=True)
    return end


def _shapes(controller: Controller) -> dict[str, list[int]]:
    context = controller.context
    shapes = {}
    for name, param in zip(context.names, context.parameters.params(), strict=True):
        if param is not None:
            # The shape of a sharded parameter is the shape of the whole.
            shapes[name] = list(param.shape)
    return shapes


def _resume(controller: Controller, state: _State) -> Iterator[tuple[str, str]]:
    """Resume from a state; yield each mismatch, with its rule if it concerns one."""
    context = controller.context
    index_of = context.index_of
    steps = {}
    gone = []
    for name, step in state.steps.items():
        if name in index_of:
            steps[index_of[name]] = step
        else:
            gone.append(name)
    context.counters.resume(steps, common=state.common_step, latest=state.step)
    if gone:
        yield "", f"the state knows {shorten_names(gone)}, which this model does not have: ignored"
    new = [name for name in index_of if name not in state.steps]
    if new:
        text = "which the state does not have: rules restart what they learn of them"
        yield "", f"the model has {shorten_names(new)}, {text}"
    shapes = _shapes(controller)
    reshaped = set()
    for name, shape in state.shapes.items():
        if shapes.get(name, shape) != shape:
            reshaped.add(name)
    traps = _learning(controller)
    learning = {trap.rule.id for trap in traps}
    for rule in sorted(state.rules.keys() - learning):
        text = f"the state knows a rule {printable(rule)}, which learns nothing here: ignored"
        yield "", text
    for trap in traps:
        rule = trap.rule.id
        for text in trap.load(state.rules.get(rule), index_of, reshaped):
            yield rule, text


def _learning(controller: Controller) -> list[SpikeEffect]:
    return [trap for trap in controller.effects.traps if isinstance(trap, SpikeEffect)]


def resume(folder: Path, controller: Controller, *, step: int | None = None) -> int | None:
    """Resume a session from the state that this rank, else rank 0, left in a directory; return its step, if there is one."""
    path = folder / state_name(_dist.rank())
    if not path.exists():  # There are more ranks than before; the state is alike on all of them.
        path = folder / state_name(0)
    if not path.exists():
        return None
    try:
        return load_state_dict(controller, _bounded_load.load(path, _MOST_BYTES), step=step)
    except (OSError, _bounded_load.RefusedError) as error:
        raise GradSurgeonError(f"{printable(f'{path}: {error}')}; {_UNREADABLE}") from None
    except GradSurgeonError as error:
        raise GradSurgeonError(f"{printable(str(path))}: {error}") from None


def write_file(path: Path, controller: Controller) -> None:
    file = io.BytesIO()
    torch.save(state_dict(controller), file)
    with replacing(path, binary=True) as target:
        target.write(file.getvalue())


def write(folder: Path, controller: Controller) -> None:
    """Write this rank's state into a directory, instead of an earlier one. Waits for the device."""
    write_file(folder / state_name(_dist.rank()), controller)
    # An earlier training with more ranks has left files that must not pass for files of this training.
    if _dist.rank() != 0:
        return
    for path in folder.glob(state_name("*")):
        rank = path.stem.rpartition("-")[2]
        if rank.isdecimal() and int(rank) >= _dist.world():
            path.unlink()
