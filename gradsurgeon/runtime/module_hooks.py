"""Hooks on modules, for values and gradients. Gradients are seen by hooks on outputs, and on views of inputs.

Full backward hooks break if a module works in place, and miss mappings.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions import LossRule, spelled
from gradsurgeon.language.planning import class_names, is_scripted
from gradsurgeon.runtime.activation_rules import ActivationRules, DueOnTensor, NamedEffect, Site
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.refusals import Hook
from gradsurgeon.runtime.shared_inputs import SharedInputs
from gradsurgeon.tensors import _unsaved_hooks
from gradsurgeon.tensors.structure import (
    Arguments,
    Path,
    describe,
    holds,
    resolve,
    tensors_in,
    with_tensors,
)

# Runs rules on one tensor, and returns the tensor that replaces it.
_Act = Callable[[DueOnTensor, Tensor], Tensor]


class _ModuleHook(Hook):
    """A hook on one side of a module."""

    def __init__(
        self,
        activations: ActivationRules,
        name: str,
        effects: Sequence[Effect],
        shared: SharedInputs | None = None,
    ) -> None:
        super().__init__(activations)
        # Set if the rules compare this module's gradient with those of other modules.
        self._shared = None if shared is None else weakref.ref(shared)
        self._site = Site(effects, name, name, activations.context)
        self._owner = name

    def _now(self, activations: ActivationRules, module: nn.Module) -> DueOnTensor | None:
        """Return the rules that act now, ``None`` if there are none."""
        due = self._site.now(training=module.training)
        if due is None or activations.may_act():
            return due
        return None

    def _is_one(self, value: Any) -> bool:
        """Return whether a value is the one tensor that all rules mean, so no structure must be searched."""
        return isinstance(value, Tensor) and not self._site.has_paths

    def _exchanged(
        self,
        structure: Any,
        due: DueOnTensor,
        act: _Act,
        path_of: Callable[[Path], Path] = lambda path: path,
    ) -> dict[Path, Tensor]:
        """Run the rules on the tensors of a structure, found by ``path_of``; return the replaced tensors by path."""
        exchanged: dict[Path, Tensor] = {}
        done: dict[tuple[int, tuple[Effect, ...]], Tensor] = {}
        starts: dict[Effect, Path | None] = {}
        for effect, _ in (*due.values, *due.grads):
            starts[effect] = self._start(structure, effect, path_of(effect.rule.ref.path))
        for path, tensor in tensors_in(structure):
            values = self._matching(due.values, path, starts)
            grads = self._matching(due.grads, path, starts)
            acting = tuple(effect for effect, _ in (*values, *grads))
            if not acting:
                continue
            # A tensor in several places, such as query, key and value, is edited only once.
            key = id(tensor), acting
            if key not in done:
                done[key] = act(DueOnTensor(values, grads), tensor)
            if done[key] is not tensor:
                exchanged[path] = done[key]
        return exchanged

    def _matching(
        self, effects: Sequence[NamedEffect], path: Path, starts: Mapping[Effect, Path | None]
    ) -> tuple[NamedEffect, ...]:
        """Return the effects on the tensor at a path; ``starts`` are the paths of their rules."""
        matching = []
        for effect, _ in effects:
            start = starts[effect]
            if start is not None and path[: len(start)] == start:
                # A rule that names one tensor by its path records it under the module's name.
                name = f"{self._owner}{spelled(path[len(start) :])}"
                matching.append(NamedEffect(effect, name))
        return tuple(matching)

    def _start(self, structure: Any, effect: Effect, path: Path) -> Path | None:
        """Return the path of a rule as the structure spells it; warn if it leads nowhere."""
        start = resolve(structure, path)
        if start is None:
            ref = effect.rule.ref
            text = f"{self._owner} has no {ref}: its {ref.side} is {describe(structure)}"
            effect.notice_once("path", text, warn=True)
        return start


class InputHook(_ModuleHook):
    """Forward pre-hook: runs rules on the input of a module."""

    def run(
        self,
        activations: ActivationRules,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        due = self._now(activations, module)
        if due is None:
            return None
        in_place = getattr(module, "inplace", False) is True

        def needs_view(_: Tensor) -> bool:
            # An in-place operation on a view would leave the hook on a stale tensor.
            return not in_place

        def act(due: DueOnTensor, tensor: Tensor) -> Tensor:
            if self._shared is not None:
                shared = self._shared()
                if shared is None:
                    return tensor
                return shared.branch(due.grads, tensor, self._owner, in_place=in_place)
            return activations.act(due, tensor, self._site.counter, needs_view)

        if len(args) == 1 and not kwargs and self._is_one(args[0]):
            out = act(due, args[0])
            if out is args[0]:
                return None
            return (out,), {}
        arguments = Arguments(module, args, kwargs)
        exchanged = self._exchanged(arguments.named, due, act, arguments.path)
        return arguments.exchange(exchanged) if exchanged else None


class OutputHook(_ModuleHook):
    """Forward hook: runs rules on the output of a module."""

    def run(
        self,
        activations: ActivationRules,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        due = self._now(activations, module)
        if due is None:
            return None

        def needs_view(tensor: Tensor) -> bool:
            # A module may return its input. The gradient of the output must not include other uses of that input.
            return holds(args, tensor) or holds(kwargs, tensor)

        def act(due: DueOnTensor, tensor: Tensor) -> Tensor:
            return activations.act(due, tensor, self._site.counter, needs_view)

        if self._is_one(output):
            out = act(due, output)
            return None if out is output else out
        exchanged = self._exchanged(output, due, act)
        return with_tensors(output, exchanged) if exchanged else None


class ModuleHooks:
    def __init__(
        self,
        modules: Mapping[str, Sequence[Effect]],
        activations: ActivationRules,
        shared: SharedInputs,
    ) -> None:
        self._modules = modules
        self._activations = activations
        self._shared = shared
        self._hooked: dict[str, tuple[weakref.ref[nn.Module], list[RemovableHandle]]] = {}

    def refresh(self, modules: Mapping[str, nn.Module]) -> list[tuple[str, bool]]:
        """Hook the modules under the names; return the names whose module changed, and whether rules act there."""
        exchanged = []
        for name, effects in self._modules.items():
            module = modules.get(name)
            hooked = None
            if name in self._hooked:
                reference, _ = self._hooked[name]
                hooked = reference()
            if hooked is module:
                continue
            self._take_off(name)
            acts = module is not None and self._put(name, effects, module)
            exchanged.append((name, acts))
        return exchanged

    def detach(self) -> None:
        for name in list(self._hooked):
            self._take_off(name)

    def _put(self, name: str, effects: Sequence[Effect], module: nn.Module) -> bool:
        activations = self._activations
        handles: list[RemovableHandle] = []
        self._hooked[name] = (weakref.ref(module), handles)
        if is_scripted(class_names(module)):
            return False
        on_shared: list[Effect] = []
        by_side: dict[str, list[Effect]] = {"input": [], "output": []}
        for effect in effects:
            same_kind = by_side[effect.rule.ref.side]
            if isinstance(effect.rule, LossRule):
                same_kind = on_shared
            same_kind.append(effect)
        if on_shared:
            hook = InputHook(activations, name, on_shared, self._shared)
            # This hook must run before all code that gives each module its own tensor: other rules, fully_shard, script hooks.
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        if by_side["input"]:
            hook = InputHook(activations, name, by_side["input"])
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if by_side["output"]:
            after = OutputHook(activations, name, by_side["output"])
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        for handle in handles:
            _unsaved_hooks.leave_behind(handle)
        return True

    def _take_off(self, name: str) -> None:
        _, handles = self._hooked.pop(name, (None, []))
        for handle in handles:
            _unsaved_hooks.take_off(handle)
