"""Hooks on modules: rules act on a module's input and output, as values and as gradients.

The package uses no full backward hooks: these break if a module works in place, and they miss mappings. A hook
on the output tensor sees the gradient of an output. For an input, the hook sits on a view that only this module
consumes. It therefore sees this module's own contribution, not the sum over all consumers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from gradsurgeon import _torch
from gradsurgeon.actions import Rule, spelled
from gradsurgeon.compiler import ModuleProgram
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import ROOT, class_names, is_scripted
from gradsurgeon.runtime.activation_rules import ActivationRules, Due, ModuleSchedule, NamedRule
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.shared_inputs import SharedInputs
from gradsurgeon.tensors.structure import (
    Arguments,
    Path,
    describe,
    holds,
    resolve,
    tensors_in,
    with_tensors,
)

# A loop without updates only drops its tensors, and their entries must not pile up.
_MOST = 1024


class TensorHooks:
    """Runs the rules of a session on activations, and hooks activations for rules on their gradients."""

    def __init__(self, sites: ActivationRules, shared: SharedInputs | None = None) -> None:
        self.sites, self.shared = sites, shared
        self.context = sites.context
        self._tags: dict[str, ModuleSchedule] = {}
        self._since_update: list[GradHook] = []
        self._most = _MOST

    def schedule(self, rules: Sequence[Rule], owner: str, name: str) -> ModuleSchedule:
        return ModuleSchedule(rules, owner, name, self.sites.counters)

    def may_act(self) -> bool:
        if self.context.paused:
            return False
        self.context.refuse_graph_capture()
        return True

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
        out = self.sites.on_value(due.values, tensor, owner, step) if due.values else tensor
        if due.grads and out.requires_grad and torch.is_grad_enabled():
            # Non-leaf tensors die with their graph. A leaf stays, and its hooks would act once
            # for each forward pass.
            if out.is_leaf or (out is tensor and needs_view(tensor)):
                out = out.view_as(out)
            self._hook(due.grads, out, owner)
        return out

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        if not self.context.program.tags:
            return tensor
        if name not in self._tags:
            rules = [rule for rule in self.context.program.tags if _matches(rule, name)]
            self._tags[name] = self.schedule(rules, ROOT, name)
        if not self.may_act():
            return tensor
        due, step = self._tags[name].now(training=True)
        return tensor if due is None else self.act(due, tensor, ROOT, step)

    def _hook(self, rules: Sequence[NamedRule], tensor: Tensor, owner: str) -> None:
        if self.sites.is_unreadable(tensor, rules, owner):
            return
        acting = tuple([named for named in rules if not self.sites.has_edited(named.rule, tensor)])
        if not acting:
            return
        for rule, _ in acting:
            self.sites.mark_edited(rule, tensor)
        hook = GradHook(self.sites, acting, owner, tensor)
        with self.sites.lock:
            if len(self._since_update) >= self._most:
                self._since_update = [one for one in self._since_update if one.tensor() is not None]
                # A model may have more modules than `_MOST`.
                self._most = max(_MOST, 2 * len(self._since_update))
            self._since_update.append(hook)
        _torch.register_hook(tensor, hook)

    def missed(self, counter: StepCounter) -> None:
        """Warn of gradients that did not come because a later operation wrote into their tensors."""
        with self.sites.lock:
            waiting, self._since_update = self._since_update, []
            for one in waiting:
                if self.sites.counters.of(one.owner) is not counter:
                    self._since_update.append(one)
                elif one.is_cut_off:
                    text = (
                        f"{one.rules[0].name} was written in place by the operation after it, so no gradient "
                        "arrived: let the next operation work out of place, or name another module"
                    )
                    self.sites.warn("in-place", text, one.rules, one.owner)


class GradHook:
    """Hook on an activation: runs rules on its gradient. It does not keep the activation alive."""

    __slots__ = ("_arrived", "_sites", "_version", "owner", "rules", "tensor")
    __torch_unserializable__ = True

    def __init__(
        self, sites: ActivationRules, rules: tuple[NamedRule, ...], owner: str, tensor: Tensor
    ) -> None:
        self._sites = weakref.ref(sites)
        self.rules, self.owner = rules, owner
        self.tensor = TensorWeakRef(tensor)
        self._version = tensor._version  # noqa: SLF001 # counts writes
        self._arrived = False

    @property
    def __name__(self) -> str:
        return f"{'+'.join(rule.id for rule, _ in self.rules)}:{self.owner}"

    @property
    def is_cut_off(self) -> bool:
        """Whether an in-place write has come between the tensor and its gradient."""
        if self._arrived or (tensor := self.tensor()) is None:
            return False
        return bool(tensor._version != self._version)  # noqa: SLF001 # counts writes

    @uncompiled
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        self._arrived = True
        sites = self._sites()
        if grad is None or sites is None or sites.context.paused:
            return None
        out = sites.on_gradient(self.rules, grad, self.owner)
        return None if out is grad else out


def _matches(rule: Rule, name: str) -> bool:
    excluded = any(compile_pattern(text).matches(name) for text in rule.exclude)
    return not excluded and any(compile_pattern(text).matches(name) for text in rule.patterns)


class _Call(NamedTuple):
    """One call of a module, and the rules due on its input or output in this call."""

    tensor_hooks: TensorHooks
    owner: str
    due: Due
    # Runs the due rules on one tensor, and returns the tensor that replaces it.
    act: Callable[[Due, Tensor], Tensor]

    def exchanged(
        self, structure: Any, path_of: Callable[[Path], Path] = lambda path: path
    ) -> dict[Path, Tensor]:
        """Run the rules on the tensors of a structure, found by ``path_of``; return the replaced tensors by path."""
        exchanged: dict[Path, Tensor] = {}
        done: dict[tuple[int, tuple[str, ...]], Tensor] = {}
        named = {
            rule.id: self._resolved(structure, rule, path_of(rule.ref.path))
            for rule, _ in (*self.due.values, *self.due.grads)
        }
        for path, tensor in tensors_in(structure):
            values, grads = (
                tuple(self._matching(path, rules, named))
                for rules in (self.due.values, self.due.grads)
            )
            due = Due(values, grads)
            rules = tuple(rule.id for rule, _ in (*due.values, *due.grads))
            if not rules:
                continue
            # A tensor in several places, such as query, key and value, is edited only once.
            key = (id(tensor), rules)
            if key not in done:
                done[key] = self.act(due, tensor)
            if done[key] is not tensor:
                exchanged[path] = done[key]
        return exchanged

    def _resolved(self, structure: Any, rule: Rule, path: Path) -> Path | None:
        resolved = resolve(structure, path)
        if resolved is None:
            text = f"{self.owner} has no {rule.ref}: its {rule.ref.side} is {describe(structure)}"
            named = NamedRule(rule, self.owner)
            self.tensor_hooks.sites.warn("path", text, [named], self.owner)
        return resolved

    def _matching(
        self, path: Path, rules: Sequence[NamedRule], named: Mapping[str, Path | None]
    ) -> Iterator[NamedRule]:
        for rule, _ in rules:
            start = named[rule.id]
            if start is not None and path[: len(start)] == start:
                # A rule that names one tensor by its path records it under the module's name.
                yield NamedRule(rule, f"{self.owner}{spelled(path[len(start) :])}")


class ModuleHook:
    """A hook on a module that reaches its session weakly."""

    def __init__(self, tensor_hooks: TensorHooks, name: str, rules: Sequence[Rule]) -> None:
        self._tensor_hooks = weakref.ref(tensor_hooks)
        self._schedule = tensor_hooks.schedule(rules, name, name)

    def _due(self, module: nn.Module) -> tuple[TensorHooks, Due, int] | None:
        due, step = self._schedule.now(training=module.training)
        # A CUDA graph would replay without the resting rules, and the session reports it.
        if due is None and not _torch.is_capturing():
            return None
        tensor_hooks = self._tensor_hooks()
        if tensor_hooks is None or not tensor_hooks.may_act() or due is None:
            return None
        return tensor_hooks, due, step

    def _is_one(self, value: Any) -> bool:
        """Tell whether a value is the one tensor that all rules mean, so no structure must be searched."""
        return isinstance(value, Tensor) and not self._schedule.has_paths


class InputHook(ModuleHook):
    """Forward pre-hook: runs rules on the input of a module."""

    @uncompiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        acting = self._due(module)
        if acting is None:
            return None
        tensor_hooks, due, step = acting
        in_place = getattr(module, "inplace", False) is True
        act = partial(self._act, tensor_hooks, step, in_place)
        if len(args) == 1 and not kwargs and self._is_one(args[0]):
            out = act(due, args[0])
            return None if out is args[0] else ((out,), {})
        arguments = Arguments(module, args, kwargs)
        call = _Call(tensor_hooks, self._schedule.owner, due, act)
        exchanged = call.exchanged(arguments.named, arguments.path)
        return arguments.exchange(exchanged) if exchanged else None

    def _act(
        self,
        tensor_hooks: TensorHooks,
        step: int,
        in_place: bool,  # noqa: FBT001 # `partial` binds it by position
        due: Due,
        tensor: Tensor,
    ) -> Tensor:
        # An in-place operation on a view would leave the hook on a stale tensor.
        return tensor_hooks.act(due, tensor, self._schedule.owner, step, lambda _: not in_place)


class SharedInputHook(InputHook):
    """Forward pre-hook: runs rules on a tensor that this module shares with other modules."""

    def _act(
        self,
        tensor_hooks: TensorHooks,
        step: int,
        in_place: bool,  # noqa: FBT001 # as above
        due: Due,
        tensor: Tensor,
    ) -> Tensor:
        del step  # the step is known only when gradients come
        shared, owner = tensor_hooks.shared, self._schedule.owner
        return shared.take(due, tensor, owner, in_place=in_place) if shared else tensor


class OutputHook(ModuleHook):
    """Forward hook: runs rules on the output of a module."""

    @uncompiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        acting = self._due(module)
        if acting is None:
            return None

        def needs_view(tensor: Tensor) -> bool:
            # A module may return its input. The gradient of the output must not include other uses of that input.
            return holds(args, tensor) or holds(kwargs, tensor)

        tensor_hooks, due, step = acting
        owner = self._schedule.owner

        def act(due: Due, tensor: Tensor) -> Tensor:
            return tensor_hooks.act(due, tensor, owner, step, needs_view)

        if self._is_one(output):
            out = act(due, output)
            return None if out is output else out
        exchanged = _Call(tensor_hooks, owner, due, act).exchanged(output)
        return with_tensors(output, exchanged) if exchanged else None


class ModuleHooks:
    def __init__(self, programs: Sequence[ModuleProgram], tensor_hooks: TensorHooks) -> None:
        self._programs = programs
        self._tensor_hooks = tensor_hooks
        self._hooked: dict[str, tuple[weakref.ref[nn.Module], list[RemovableHandle]]] = {}

    def refresh(self, modules: Mapping[str, nn.Module]) -> list[tuple[str, bool]]:
        """Hook the modules under the names; return the names whose module changed, and whether rules act there."""
        exchanged = []
        for program in self._programs:
            module = modules.get(program.name)
            hooked = self._hooked.get(program.name)
            if (None if hooked is None else hooked[0]()) is not module:
                self._take_off(program.name)
                acts = module is not None and self._put(program, module)
                exchanged.append((program.name, acts))
        return exchanged

    def put_first(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """Move hooks that must run first before hooks registered since; return the ids of their rules."""
        shared = [program for program in self._programs if program.on_shared]
        for program in shared:
            self._take_off(program.name)
        self.refresh(modules)
        return list(dict.fromkeys(rule.id for program in shared for rule in program.on_shared))

    def detach(self) -> None:
        for name in list(self._hooked):
            self._take_off(name)

    def _put(self, program: ModuleProgram, module: nn.Module) -> bool:
        handles: list[RemovableHandle] = []
        self._hooked[program.name] = (weakref.ref(module), handles)
        if is_scripted(class_names(module)):
            return False
        if program.on_shared:
            shared = SharedInputHook(self._tensor_hooks, program.name, program.on_shared)
            # This hook must run before all code that gives each module its own tensor: other rules, fully_shard, script hooks.
            handles.append(module.register_forward_pre_hook(shared, with_kwargs=True, prepend=True))
        if program.on_input:
            before = InputHook(self._tensor_hooks, program.name, program.on_input)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if program.on_output:
            after = OutputHook(self._tensor_hooks, program.name, program.on_output)
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        for handle in handles:
            _torch.leave_behind(handle)
        return True

    def _take_off(self, name: str) -> None:
        _, handles = self._hooked.pop(name, (None, []))
        for handle in handles:
            _torch.take_off(handle)
