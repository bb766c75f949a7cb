"""Runs rules on activations, which are module tensors and tagged tensors: on their values and on their gradients."""

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon.actions import Rule
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.language.planning import ROOT
from gradsurgeon.runtime.backward_watch import BackwardWatch, is_taken
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import Schedule, StepCounter, StepCounters
from gradsurgeon.runtime.effect import Effect, Effects, Origin
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._torch import uncompiled

_UNREADABLE = (
    "left a tensor alone that has no numbers to read (a transform of torch.func, is_grads_batched, the meta device, "
    "torch.export, a parameter that FSDP has freed): compute this part without that, or after session.remove()"
)
_ODD = "torch has few operations for tensors that are nested, masked, compressed (CSR and the like) or in float8"
_WRITTEN = "{name} was written in place by the next operation, so no gradient arrived: let it work out of place"


class NamedRule(NamedTuple):
    """A rule, and the name of its tensor in records and messages."""

    rule: Rule
    name: str


class Due(NamedTuple):
    """The rules that act in one call, in file order: on the value of a tensor, and on its gradient."""

    values: tuple[NamedRule, ...]
    grads: tuple[NamedRule, ...]


class ModuleCounters:
    """Looks up the step counter of a module now: that of the optimizer that owns its first parameter."""

    def __init__(
        self, counters: StepCounters, param_names: Sequence[str], schedule: Schedule
    ) -> None:
        self.all = counters
        self.schedule = schedule
        self._first_params: dict[str, int] = {}
        for number, name in enumerate(param_names):
            while name:
                name = name.rpartition(".")[0]  # noqa: PLW2901 # the name of the parent module
                self._first_params.setdefault(name, number)

    def of(self, module: str) -> StepCounter:
        if not self._first_params:
            return self.all.common
        # A module without parameters uses the first parameter of the model.
        return self.all[self._first_params.get(module, 0)]


class Site:
    """The rules on one side of a module, or on a tag. The owner is the module whose step counter applies."""

    def __init__(
        self, rules: Sequence[Rule], owner: str, name: str, counters: ModuleCounters
    ) -> None:
        self.owner = owner
        self._schedule = counters.schedule
        # Whether a rule names one tensor of a structure.
        self.has_paths = any(rule.ref.path for rule in rules)
        # `ref.grad` is read once: computing it takes longer than a rule takes on a small tensor.
        self._rules = [(NamedRule(rule, name), rule.ref.grad) for rule in rules]
        self._counters = counters

    def now(self, *, training: bool) -> tuple[Due | None, int]:
        """Return the due rules, or ``None``, and the step."""
        step = self._counters.of(self.owner).step
        acting = [
            (named, grad)
            for named, grad in self._rules
            if self._schedule.due(named.rule, step) and (training or named.rule.when is None)
        ]
        values = tuple([named for named, grad in acting if not grad])
        due = Due(values, tuple([named for named, grad in acting if grad])) if acting else None
        return due, step


class ActivationRules:
    """Runs the rules of a session on activations, and hooks activations for rules on their gradients."""

    def __init__(
        self, context: Context, passes: BackwardWatch, counters: ModuleCounters, effects: Effects
    ) -> None:
        self.context, self.passes, self.counters = context, passes, counters
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
        if not self.context.program.tags:
            return tensor
        if self.context.tag_watcher is not None:
            self.context.tag_watcher(name, tensor)
        if name not in self._tags:
            rules = [rule for rule in self.context.program.tags if _matches(rule, name)]
            self._tags[name] = Site(rules, ROOT, name, self.counters)
        if not self.may_act():
            return tensor
        due, step = self._tags[name].now(training=True)
        return tensor if due is None else self.act(due, tensor, ROOT, step)

    def act(
        self,
        due: Due,
        tensor: Tensor,
        owner: str,
        step: int,
        # Tells whether the gradient of a view is meant, because other code uses the tensor also.
        needs_view: Callable[[Tensor], bool] = lambda _: False,
    ) -> Tensor:
        """Run rules on a tensor, and hook it for rules on its gradient; return the tensor to go on with."""
        out = self._on_value(due.values, tensor, owner, step) if due.values else tensor
        if due.grads and out.requires_grad and torch.is_grad_enabled():
            # Non-leaf tensors die with their graph. A leaf stays, and its hooks would act once
            # for each forward pass.
            if out.is_leaf or (out is tensor and needs_view(tensor)):
                out = out.view_as(out)
            self._hook(due.grads, out, owner)
        return out

    def _hook(self, rules: Sequence[NamedRule], tensor: Tensor, owner: str) -> None:
        if self.is_unreadable(tensor, rules, owner):
            return
        with self.lock:
            hooks = self._hooks.setdefault(tensor, [])
            edits = self._edits_of(tensor, hooks)
            acting = [named for named in rules if named.rule.id not in edits]
            if not acting:
                return
            hook = GradHook(self, acting, owner, tensor)
            hooks.append(hook)
        _torch.register_hook(tensor, hook)

    def _edits_of(self, tensor: Tensor, hooks: Sequence["GradHook"]) -> set[str]:
        """Return the ids of the rules that will edit the gradient of a tensor as it is now."""
        # A container returns the tensor of its last child: both outputs have one gradient, and a rule edits it once.
        # After a write in place the tensor object stands for another value, with a gradient of its own.
        current = [hook for hook in hooks if hook.version == tensor._version]  # noqa: SLF001 # counts writes
        named_rules = [named for hook in current for named in hook.rules]
        return {rule.id for rule, _ in named_rules if self._effects[rule.id].edits}

    def _on_value(
        self, rules: Sequence[NamedRule], tensor: Tensor, owner: str, step: int
    ) -> Tensor:
        """Run rules on the value of a tensor of any shape and dtype; return the value that replaces it."""
        if self.is_unreadable(tensor, rules, owner):
            return tensor
        # Checkpointing runs forward again inside backward: edits must repeat, records must not repeat.
        again = _torch.graph_task() != -1
        counter = partial(self.counters.of, owner)
        out = tensor
        with self.lock:
            for rule, name in rules:
                effect = self._effects[rule.id]
                if self._is_fit(out, effect, name, owner):
                    origin = Origin(name, step, counter, is_gradient=False, is_again=again)
                    out = effect.on_tensor(out, origin)
        return out if self.context.mode == "act" else tensor

    def on_gradient(self, rules: Sequence[NamedRule], grad: Tensor, owner: str) -> Tensor:
        if self.is_unreadable(grad, rules, owner):
            return grad
        # Passes of single losses come before the training pass. Edits must act in all of these passes;
        # records come from the training pass alone.
        again = is_taken()
        with self.lock:
            # Without rules on parameters, this flag is all that shows the session a backward pass.
            self.passes.seen.module |= not again
            out, scale = grad, self.context.scaling.scale
            counter = partial(self.counters.of, owner)
            step = counter().step
            for rule, name in rules:
                effect = self._effects[rule.id]
                if self._is_fit(out, effect, name, owner):
                    origin = Origin(name, step, counter, scale=scale, is_again=again)
                    out = effect.on_tensor(out, origin)
        return out if self.context.mode == "act" else grad

    def is_unreadable(self, tensor: Tensor, rules: Sequence[NamedRule], owner: str) -> bool:
        """Return whether a tensor has no numbers to read, so rules leave it alone; warn once."""
        unreadable = _torch.is_unreadable(tensor)
        if unreadable:
            self.warn("unreadable", _UNREADABLE, rules, owner)
        return unreadable

    def _is_fit(self, tensor: Tensor, effect: Effect, name: str, owner: str) -> bool:
        """Return whether an effect can act on a tensor; warn once where a person could expect it."""
        reason = ""
        if tensor.is_complex():  # for parameters, binding checks this
            reason = effect.rule.complex_problem()
        elif _torch.lacks_operations(tensor) and not effect.takes_any:
            reason = _ODD
        if reason:
            text = f"left {name} alone: {reason}; `exclude` it from the rule"
            self.warn("unfit", text, [NamedRule(effect.rule, name)], owner)
            return False
        # Token ids and masks are values too, but bounds, factors and norms make no sense for them.
        return effect.takes_any or tensor.is_floating_point() or tensor.is_complex()

    def warn(self, topic: str, text: str, rules: Sequence[NamedRule], owner: str) -> None:
        step = self.counters.of(owner).step
        for rule, _ in rules:
            self.context.event_log.notice_once(topic, text, rule=rule.id, step=step, warn=True)

    def missed(self, counter: StepCounter) -> None:
        """Warn of gradients that did not come because a later operation wrote into their tensors."""
        with self.lock:
            for tensor, hooks in list(self._hooks.items()):
                for hook in hooks:
                    if hook.is_cut_off_from(tensor) and self.counters.of(hook.owner) is counter:
                        text = _WRITTEN.format(name=hook.rules[0].name)
                        self.warn("in-place", text, hook.rules, hook.owner)
                if all(hook.arrived or self.counters.of(hook.owner) is counter for hook in hooks):
                    del self._hooks[tensor]


class GradHook:
    """Hook on an activation: runs rules on its gradient. It does not keep the activation alive."""

    __slots__ = ("_activations", "arrived", "owner", "rules", "version")
    __torch_unserializable__ = True

    def __init__(
        self, activations: ActivationRules, rules: Sequence[NamedRule], owner: str, tensor: Tensor
    ) -> None:
        self._activations = weakref.ref(activations)
        self.rules, self.owner = rules, owner
        self.version = tensor._version  # noqa: SLF001 # counts writes
        self.arrived = False

    def is_cut_off_from(self, tensor: Tensor) -> bool:
        """Return whether an in-place write has come between the tensor and its gradient."""
        return not self.arrived and tensor._version != self.version  # noqa: SLF001 # as above

    @uncompiled
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        self.arrived = True
        activations = self._activations()
        if grad is None or activations is None:
            return None
        with activations.context.refusals:
            if not activations.context.paused:
                out = activations.on_gradient(self.rules, grad, self.owner)
                return None if out is grad else out
        return None


def _matches(rule: Rule, name: str) -> bool:
    excluded = any(compile_pattern(text).matches(name) for text in rule.exclude)
    return not excluded and any(compile_pattern(text).matches(name) for text in rule.patterns)
