"""Runs rules on activations, which are module tensors and tagged tensors: on their values and on their gradients."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon.actions import Rule
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.language.planning import ROOT
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.refusals import Hook
from gradsurgeon.runtime.running_passes import is_taken
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _torch

_UNREADABLE = (
    "left a tensor alone that has no numbers to read (a transform of torch.func, is_grads_batched, the meta device, "
    "torch.export, a parameter that FSDP has freed): compute this part without that, or after session.remove()"
)
_ODD = "torch has few operations for tensors that are nested, masked, compressed (CSR and the like) or in float8"
_WRITTEN = "{name} was written in place by the next operation, so no gradient arrived: let it work out of place"


_CounterOf = Callable[[], StepCounter]


class NamedEffect(NamedTuple):
    """An effect, and the name of its tensor in records and messages."""

    effect: Effect
    name: str


class DueOnTensor(NamedTuple):
    """The effects that act in one call, in file order: on the value of a tensor, and on its gradient."""

    values: tuple[NamedEffect, ...]
    grads: tuple[NamedEffect, ...]


class Site:
    """The effects on one side of a module, or on a tag."""

    def __init__(self, effects: Sequence[Effect], owner: str, name: str, context: Context) -> None:
        # Returns the step counter of the module now.
        self.counter = partial(context.counters.of_module, owner)
        self._refusals = context.refusals
        # Whether a rule names one tensor of a structure.
        self.has_paths = False
        self._on_values: list[NamedEffect] = []
        self._on_grads: list[NamedEffect] = []
        for effect in effects:
            ref = effect.rule.ref
            if ref.path:
                self.has_paths = True
            # `ref.grad` is read once: computing it takes longer than a rule takes on a small tensor.
            same_kind = self._on_grads if ref.grad else self._on_values
            same_kind.append(NamedEffect(effect, name))

    def now(self, *, training: bool) -> DueOnTensor | None:
        """Return the due effects, ``None`` if there are none."""
        step = self.counter().step
        values = self._due(self._on_values, step, training=training)
        grads = self._due(self._on_grads, step, training=training)
        if not values and not grads:
            return None
        return DueOnTensor(values, grads)

    def _due(
        self, effects: Sequence[NamedEffect], step: int, *, training: bool
    ) -> tuple[NamedEffect, ...]:
        due = []
        for named in effects:
            rule = named.effect.rule
            if not training and rule.when is not None:
                continue
            if self._refusals.lets_act(rule, step):
                due.append(named)
        return tuple(due)


class ActivationRules:
    """Runs the rules of a session on activations, and hooks activations for rules on their gradients."""

    def __init__(self, context: Context, passes: BackwardWatch, effects: Effects) -> None:
        self.context = context
        self.passes = passes
        self._effects = effects
        # Replicas of a model run in several threads, and autograd calls hooks in one thread per device.
        self.lock = RLock()
        self._tags: dict[str, Site] = {}
        # The hooks on each tensor since the last update.
        self._hooks: MutableMapping[Tensor, list[GradHook]] = WeakTensorKeyDictionary()

    def may_act(self) -> bool:
        self.context.refuse_graph_capture()
        return not self.context.paused

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        if not self._effects.tags:
            return tensor
        if self.context.tag_watcher is not None:
            self.context.tag_watcher(name, tensor)
        if name not in self._tags:
            tagged = [effect for effect in self._effects.tags if matches(effect.rule, name)]
            self._tags[name] = Site(tagged, ROOT, name, self.context)
        if not self.may_act():
            return tensor
        site = self._tags[name]
        due = site.now(training=True)
        if due is None:
            return tensor
        return self.act(due, tensor, site.counter)

    def act(
        self,
        due: DueOnTensor,
        tensor: Tensor,
        counter: _CounterOf,
        # Tells whether the gradient of a view is meant, because other code uses the tensor also.
        needs_view: Callable[[Tensor], bool] = lambda _: False,
    ) -> Tensor:
        """Run rules on a tensor, and hook it for rules on its gradient; return the tensor to go on with."""
        out = tensor
        if due.values:
            out = self._on_value(due.values, tensor, counter)
        if due.grads and out.requires_grad and torch.is_grad_enabled():
            # Non-leaf tensors die with their graph. A leaf stays, and its hooks would act once
            # for each forward pass.
            if out.is_leaf or (out is tensor and needs_view(tensor)):
                out = out.view_as(out)
            self._hook(due.grads, out, counter)
        return out

    def _hook(self, effects: Sequence[NamedEffect], tensor: Tensor, counter: _CounterOf) -> None:
        if self.is_unreadable(tensor, effects):
            return
        with self.lock:
            hooks = self._hooks.setdefault(tensor, [])
            edits = self._edits_of(tensor, hooks)
            acting = [named for named in effects if named.effect not in edits]
            if not acting:
                return
            hook = GradHook(self, acting, counter, tensor)
            hooks.append(hook)
        _torch.register_hook(tensor, hook)

    def _edits_of(self, tensor: Tensor, hooks: Sequence["GradHook"]) -> set[Effect]:
        """Return the effects that will edit the gradient of a tensor as it is now."""
        # A container returns the tensor of its last child: both outputs have one gradient, and a rule edits it once.
        editing: set[Effect] = set()
        for hook in hooks:
            # After a write in place the tensor object holds another value, with a gradient of its own.
            if hook.version != tensor._version:  # noqa: SLF001 # counts writes
                continue
            for effect, _ in hook.effects:
                if effect.edits:
                    editing.add(effect)
        return editing

    def _on_value(
        self, effects: Sequence[NamedEffect], tensor: Tensor, counter: _CounterOf
    ) -> Tensor:
        """Run rules on the value of a tensor of any shape and dtype; return the value that replaces it."""
        if self.is_unreadable(tensor, effects):
            return tensor
        # Checkpointing runs forward again inside backward: edits must repeat, records must not repeat.
        again = _torch.graph_task() != -1
        step = counter().step
        named = partial(Origin, step=step, counter=counter, is_gradient=False, is_again=again)
        with self.lock:
            return self._run(effects, tensor, named)

    def _run(
        self,
        effects: Sequence[NamedEffect],
        tensor: Tensor,
        named: Callable[[str], Origin],
    ) -> Tensor:
        """Run rules on a tensor, given its origin by its name in their records; return the tensor that replaces it."""
        out = tensor
        for effect, name in effects:
            if self._is_fit(out, effect, name):
                out = effect.on_tensor(out, named(name))
        return out if self.context.acts else tensor

    def on_gradient(
        self, effects: Sequence[NamedEffect], grad: Tensor, counter: _CounterOf
    ) -> Tensor:
        if self.is_unreadable(grad, effects):
            return grad
        # Passes of single losses come before the training pass. Edits must act in all of these passes;
        # records come from the training pass alone.
        again = is_taken()
        with self.lock:
            # Without rules on parameters, this flag is all that shows the session a backward pass.
            self.passes.seen.module |= not again
            scale = self.context.scaling.scale
            step = counter().step
            named = partial(Origin, step=step, counter=counter, scale=scale, is_again=again)
            return self._run(effects, grad, named)

    def is_unreadable(self, tensor: Tensor, effects: Sequence[NamedEffect]) -> bool:
        """Return whether a tensor has no numbers to read, so rules leave it alone; warn once."""
        unreadable = _torch.is_unreadable(tensor)
        if unreadable:
            warn(effects, "unreadable", _UNREADABLE)
        return unreadable

    def _is_fit(self, tensor: Tensor, effect: Effect, name: str) -> bool:
        """Return whether an effect can act on a tensor; warn once where a person could expect it."""
        reason = ""
        if tensor.is_complex():  # for parameters, binding checks this
            reason = effect.rule.complex_problem()
        elif _torch.lacks_operations(tensor) and not effect.takes_any:
            reason = _ODD
        if reason:
            text = f"left {name} alone: {reason}; `exclude` it from the rule"
            effect.notice_once("unfit", text, warn=True)
            return False
        # Token ids and masks are values too, but bounds, factors and norms make no sense for them.
        return effect.takes_any or tensor.is_floating_point() or tensor.is_complex()

    def missed(self, counter: StepCounter) -> None:
        """Warn of gradients that did not come because a later operation wrote into their tensors."""
        with self.lock:
            for tensor, hooks in list(self._hooks.items()):
                for hook in hooks:
                    if hook.is_cut_off_from(tensor) and hook.counter() is counter:
                        text = _WRITTEN.format(name=hook.effects[0].name)
                        warn(hook.effects, "in-place", text)
                waiting = [hook for hook in hooks if not hook.arrived]
                if all(hook.counter() is counter for hook in waiting):
                    del self._hooks[tensor]


class GradHook(Hook):
    """Hook on an activation: runs rules on its gradient. It does not keep the activation alive."""

    def __init__(
        self,
        activations: ActivationRules,
        effects: Sequence[NamedEffect],
        counter: _CounterOf,
        tensor: Tensor,
    ) -> None:
        super().__init__(activations)
        self.effects = effects
        self.counter = counter
        self.version = tensor._version  # noqa: SLF001 # counts writes
        self.arrived = False

    def is_cut_off_from(self, tensor: Tensor) -> bool:
        """Return whether an in-place write has come between the tensor and its gradient."""
        return not self.arrived and tensor._version != self.version  # noqa: SLF001 # as above

    def run(self, activations: ActivationRules, grad: Tensor | None) -> Tensor | None:
        self.arrived = True
        if grad is None or activations.context.paused:
            return None
        out = activations.on_gradient(self.effects, grad, self.counter)
        return None if out is grad else out


def warn(effects: Iterable[NamedEffect], topic: str, text: str) -> None:
    for effect, _ in effects:
        effect.notice_once(topic, text, warn=True)


def matches(rule: Rule, name: str) -> bool:
    return _are_any(rule.patterns, name) and not _are_any(rule.exclude, name)


def _are_any(patterns: Sequence[str], name: str) -> bool:
    # A name such as `loss[1]` is also a pattern, of another name.
    return name in patterns or any(compile_pattern(text).matches(name) for text in patterns)
