"""The sessions of all models, and the hooks and patches that all sessions share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions.checks.script_clips import watch_clips
from gradsurgeon.common._patching import Patch
from gradsurgeon.distributed import data_parallel
from gradsurgeon.forensics.kept_calls import SAMPLE_IDS
from gradsurgeon.runtime import loss_backward, running_steps
from gradsurgeon.runtime.attachment import Attachment
from gradsurgeon.runtime.backward_watch import BackwardWatch, around_passes
from gradsurgeon.runtime.controller import Controller
from gradsurgeon.runtime.engines import Engines
from gradsurgeon.runtime.scaler_watch import watched
from gradsurgeon.tensors import _backward_calls, _torch
from gradsurgeon.tensors._torch import uncompiled
from gradsurgeon.tensors.backward_graph import BackwardGraph

# All sessions, in the order in which they act: the sessions of the launcher act after those of the script.
# A session lives as long as its model or one of its modules, even if the caller drops the session.
_attached: list[Attachment] = []
# Several threads may train, and sessions must not come or go during an iteration.
_changing = RLock()
# The shared watches on optimizer steps, scaler calls, backward passes, and replaced parameters and modules.
_watching: list[ExitStack] = []
# One entry per caller that watches the steps; all entries are the same handle.
_watching_steps: list[RemovableHandle] = []
# Present from the moment a module of a model gets something new until the next forward pass.
_before_forward: list[RemovableHandle] = []
# The ids of the rules on tags, over all sessions.
_on_tags: list[str] = []


def find(model: nn.Module) -> Attachment | None:
    for attachment in applied_to(model):
        if attachment.model() is model:
            return attachment
    return None


def applied_to(model: nn.Module) -> list[Attachment]:
    """Return the session of a model, and sessions left behind by an earlier container of its modules."""
    with _changing:
        attachments = list(_attached)
    applied = []
    for attachment in attachments:
        if attachment.removed or attachment.context.outside:
            continue
        if attachment.model() is model or _has_outlived(attachment, model):
            applied.append(attachment)
    return applied


def _has_outlived(attachment: Attachment, model: nn.Module) -> bool:
    """Return whether the model of a session is gone, and another model has some of its modules."""
    if attachment.model() is not None:
        return False
    return not set(model.modules()).isdisjoint(attachment.controller.model.modules)


def watch_steps() -> None:
    """Watch every optimizer step until `unwatch_steps`; called before a step in which a session may be attached."""
    if _watching_steps:
        _watching_steps.append(_watching_steps[0])
    else:
        _watching_steps.append(register_optimizer_step_pre_hook(_on_step))


def unwatch_steps() -> None:
    """End one call of `watch_steps`."""
    handle = _watching_steps.pop()
    if not _watching_steps:
        handle.remove()


def enter(model: nn.Module, attachment: Attachment) -> None:
    """Attach a session to a model, and remove earlier sessions of the script on it. All or nothing.

    A session of the launcher replaces no other, and acts after the sessions of the script.
    """
    is_of_launcher = attachment.context.outside
    replaced = [] if is_of_launcher else applied_to(model)
    # The finalizer notices when a model dies; it must not keep the model alive.
    finalizer = weakref.finalize(model, attachment.model_gone)
    finalizer.atexit = False
    try:
        attachment.attach(partial(_leave, finalizer))
    except BaseException:
        finalizer.detach()
        raise
    try:
        for earlier in replaced:
            earlier.remove()
    except BaseException:  # Ctrl-C during a wait
        attachment.remove_with_records()
        raise
    with _changing:
        # Replaced at once: another thread may be about to iterate over the sessions.
        _attached[:] = sorted([*_attached, attachment], key=attrgetter("context.outside"))
        for other in _attached:
            if other.context.outside and not is_of_launcher:
                other.controller.steps.go_last()
                if other.model() is model:
                    other.controller.go_last()
        _sessions_changed()
        if not _watching:
            _watching.append(_watch())


def _leave(finalizer: weakref.finalize[Any, Any]) -> None:
    finalizer.detach()
    with _changing:
        _attached[:] = [attachment for attachment in _attached if not attachment.removed]
        _sessions_changed()
        if _watching and not _attached:
            _watching.pop().close()


def _sessions_changed() -> None:
    on_tags = []
    for controller in _controllers():
        on_tags += [effect.rule.id for effect in controller.effects.tags]
    _on_tags[:] = on_tags
    loss_backward.note_retained(wanted=bool(_with_loss_rules()))


def _watch() -> ExitStack:
    with ExitStack() as stack:
        watch_steps()
        stack.callback(unwatch_steps)
        stack.callback(running_steps.watch_ends())
        stack.enter_context(watched(_on_scale, _around_scaler_step))
        stack.callback(_backward_calls.around(around_passes(_backward_watches, _before_pass)))
        stack.callback(data_parallel.watch())
        stack.callback(watch_clips())
        stack.callback(_engines.close)
        stack.callback(Patch(torch.utils, "swap_tensors", _swap).undo)
        for register in (
            module_hooks.register_module_module_registration_hook,
            module_hooks.register_module_parameter_registration_hook,
        ):
            stack.callback(register(_on_registration).remove)
        stack.callback(_look_at_models)
        return stack.pop_all()


def tag(tensor: Tensor, name: str) -> Tensor:
    """Show a tensor to the rules of all sessions; return the tensor to go on with."""
    # An evaluation belongs to no step.
    if name == SAMPLE_IDS and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        for controller in _controllers():
            # The replay of a step runs the call again.
            if not controller.context.is_paused:
                controller.kept.keep_sample_ids(tensor)
    # Code compiled without rules on tags recompiles once this list is no longer empty.
    if not _on_tags:
        return tensor
    return _show(tensor, name)


# Without rules on tags the call becomes part of the caller's graph, but never a graph of its own.
_torch.compile_within_caller(tag)


@uncompiled
def _show(tensor: Tensor, name: str) -> Tensor:
    for controller in _controllers():
        with controller.context.refusals:
            tensor = controller.activations.tag(tensor, name)
    return tensor


def backward(losses: Mapping[str, Tensor], scaler: GradScaler | None) -> None:
    """Run the backward pass of the sum of losses, with the rules of all sessions on each loss's gradient."""
    controllers = _with_loss_rules()
    rules = [controller.losses for controller in controllers]
    loss_backward.backward(losses, scaler, rules, _modules_of(controllers))


def _modules_of(controllers: Sequence[Controller]) -> Iterator[nn.Module]:
    for controller in controllers:
        yield from controller.model.modules


@uncompiled
def _on_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Hooks registered on the optimizer here still run in this same step, after the hooks that the script
    # registered before.
    del args, kwargs
    for controller in _controllers():
        try:
            controller.steps.about_to_step(optimizer)
        except Exception as error:
            if not controller.context.refusals.goes_on_after(error):
                raise


def _swap(original: Callable[..., None], first: Tensor, second: Tensor) -> None:
    """Exchange the contents of two tensors, as conversions do, and reinstall their hooks afterwards."""
    original(first, second)
    for controller in _controllers():
        with controller.context.refusals:
            controller.model.swapped((first, second))


@uncompiled
def _on_registration(module: nn.Module, name: str, value: object) -> None:
    """Schedule a search for replaced parameters and layers before the next forward pass."""
    del name, value
    if _before_forward:
        return
    for controller in _controllers():
        with controller.context.refusals:
            if controller.model.knows(module):
                look = module_hooks.register_module_forward_pre_hook(_look_at_models)
                _before_forward.append(look)
                return


@uncompiled
def _look_at_models(*_: object) -> None:
    while _before_forward:
        _before_forward.pop().remove()
    for controller in _controllers():
        with controller.context.refusals:
            controller.model.before_forward()


@uncompiled
def _on_scale(scaler: GradScaler, losses: Sequence[Tensor]) -> None:
    for controller in _controllers():
        with controller.context.refusals:
            controller.context.scaling.scaled(scaler, losses)


@contextmanager
def _around_scaler_step(scaler: GradScaler, optimizer: Optimizer) -> Iterator[None]:
    with ExitStack() as stack:
        for controller in _controllers():
            with controller.context.refusals:
                stack.enter_context(controller.scaler_step(scaler, optimizer))
        yield


def _backward_watches() -> list[BackwardWatch]:
    return [controller.backward for controller in _controllers()]


def _before_pass(graph: BackwardGraph, inputs: Sequence[Tensor]) -> None:
    _engines.meet()
    if data_parallel.is_any_awaiting():
        rules = [controller.losses for controller in _with_loss_rules()]
        loss_backward.before_plain_pass(rules, graph, inputs)


def _with_loss_rules() -> list[Controller]:
    return [controller for controller in _controllers() if controller.losses.effects]


def _controllers() -> list[Controller]:
    controllers = []
    for attachment in tuple(_attached):
        if attachment.removed or attachment.context.refusals.over:
            continue
        controllers.append(attachment.controller)
    return controllers


_engines = Engines(_controllers)
