"""Keeps the calls of a model while it trains, so that a failed step can be run again. Nothing waits for a device."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurgeon.forensics.kept_step import KeptCall, KeptStep, fingerprint
from gradsurgeon.forensics.undisturbed import RandomState
from gradsurgeon.language.planning import ROOT, class_names, is_scripted, named_modules
from gradsurgeon.tensors import _backward_calls, _torch, _unsaved_hooks
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.structure import Copied, Path, tensors_in

# Of the random states; Python keeps each of 625 words as an object.
_RANDOM_BYTES = 50_000
# A forward pass that writes into a larger buffer differs in the replay.
_LARGEST_BUFFER = 2**16


class KeptCalls:
    """Keeps the calls of one model until the step ends that they feed."""

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        self._is_paused = is_paused
        # The number of calls in evaluation mode without gradients; `None` if calls were never seen.
        self.evaluations: int | None = None
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.step = KeptStep()
        # The number of backward passes of this step that have reached parameters.
        self.reaching = 0
        # Whether a backward pass has begun and not reached a call yet.
        self._begins = False
        self._handles: list[RemovableHandle] = []
        self._buffers: dict[str, list[tuple[str, dict[str, Any], str]]] = {}
        self._devices: tuple[str, ...] = ()
        self._kinds = {"cpu"}
        # The calls that run, outermost first. Only the outermost one is kept.
        self._running: list[KeptCall | None] = []

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self.model = weakref.ref(model)
        self.evaluations = self.evaluations or 0
        devices = [
            device
            for device in {param.device for param in model.parameters()}
            if device.type not in ("cpu", "meta")
            and hasattr(torch.get_device_module(device), "get_rng_state")
        ]
        self._devices = tuple(map(str, devices))
        self._kinds = {"cpu", *(device.type for device in devices)}
        for name, module in _called(model):
            if is_scripted(class_names(module)):
                continue  # Its code calls no hooks.
            self._buffers[name] = _buffers(module)
            # Compiled code calls no hook of ours, but hooks around it see its calls. A replay runs without it.
            compiled = name == ROOT and type(model).__name__ == "OptimizedModule"
            hooked = model if compiled else module
            hook = _Hook(self, name, module)
            # It comes before hooks of the script, which a replay runs as well.
            before = hooked.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
            for handle in (before, hooked.register_forward_hook(hook.after, always_call=True)):
                _unsaved_hooks.leave_behind(handle)
                self._handles.append(handle)
        self._forget()

    def detach(self) -> None:
        while self._handles:
            _unsaved_hooks.take_off(self._handles.pop())
        self._forget()

    def _forget(self) -> None:
        self.step = KeptStep()
        self.reaching = 0

    def updated(self) -> None:
        """Note an update. Until the model is called again, the calls may feed the update of another optimizer."""
        self.step.updated = bool(self._handles)

    def begin(
        self, module: nn.Module, name: str, args: Any, kwargs: dict[str, Any], *, compiled: bool
    ) -> None:
        self._running.append(None)
        outermost = len(self._running) == 1
        if outermost and self.step.updated:
            self._forget()
        if outermost and not (torch.is_grad_enabled() or module.training):
            self.evaluations = (self.evaluations or 0) + 1
        if not outermost or not torch.is_grad_enabled():
            return
        if torch._C._get_tracing_state() is not None:  # noqa: SLF001 # the public name has no types
            return
        if self._is_paused():
            self.step.problem = "the session was paused"
            return
        # The tables of scripted modules have no `get`.
        places = [(path, table[key]) for path, table, key in self._buffers[name] if key in table]
        buffers = [(path, b) for path, b in places if b is not None and readable(b) is not None]
        given: list[Tensor]
        if not kwargs and {*map(type, args)} == {Tensor}:  # nearly always: nothing needs a copy
            iterators: list[str] = []
            given = list(args)
        else:
            # The script may change its dicts and lists later.
            copied = Copied((args, kwargs))
            args, kwargs = copied.value
            iterators = copied.iterators
            given = [tensor for _, tensor in tensors_in(copied.value)]
        call = KeptCall(
            weakref.ref(module),
            name,
            args,
            kwargs,
            RandomState.now(self._devices),
            {path: buffer.detach().clone() for path, buffer in buffers},
            {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in self._kinds},
            compiled=compiled,
            iterators=tuple(iterators),
        )
        held = [*given, *call.buffers.values()]
        call.bytes = _RANDOM_BYTES + sum([x.numel() * x.element_size() for x in held])
        self._running[-1] = call

    def end(self, output: Any) -> None:
        call = self._running.pop() if self._running else None
        if call is None or output is None:
            return  # Without output the call has raised, or returned nothing.
        for path, tensor in tensors_in(output):
            if not (tensor.requires_grad or tensor.is_floating_point()):
                continue
            if (known := fingerprint(tensor)) is not None:
                call.outputs[path] = known
                call.versions[path] = _torch.writes(known[1])
                call.bytes += known[1].nbytes
            if (node := tensor.grad_fn) is not None:
                keep = partial(self._keep, weakref.ref(call), path, tensor.output_nr)
                node.register_prehook(keep)
                call.last_node = max(call.last_node, node._sequence_nr())  # noqa: SLF001 # no public name
        self.step.calls.append(call)
        self.step.shorten()

    def spare(self, error: Exception) -> None:
        """Note an error of our own instead of raising it in the script: the call is then not kept."""
        self.step.dropped += 1
        self.step.problem = f"{type(error).__name__}: {error}"

    def keep_loss(self, graph: BackwardGraph, *, accumulates: bool) -> None:
        """Keep the graph from the outputs of the calls to the loss of a backward pass that begins.

        ``accumulates`` tells whether a parameter that it reaches has a gradient already.
        """
        self._begins = True
        step = self.step
        if self.reaching and not accumulates:
            # The script has cleared the gradients of earlier passes.
            step.calls = [call for call in step.calls if not call.number]
            step.losses.clear()
        if step.calls and not self._is_paused():
            try:
                step.keep_loss(graph)
            except Exception as error:  # noqa: BLE001 # tensors of any kind may raise anything
                self.spare(error)

    def _keep(self, call: weakref.ref[KeptCall], path: Path, number: int, grads: Any) -> None:
        try:
            kept = call()
            if _backward_calls.is_only_grad():
                return  # `torch.autograd.grad` is not training.
            if self._begins:
                self._begins = False
                self.step.passes += 1
            if kept is None or grads[number] is None:
                return
            grad = grads[number].detach()
            # Several passes through one output add up, as they do in the parameters.
            kept.grads[path] = kept.grads[path] + grad if path in kept.grads else grad
            kept.number = kept.number or self.step.passes
            kept.bytes += grad.numel() * grad.element_size()
            self.step.shorten()
        except Exception as error:  # noqa: BLE001 # as above
            self.spare(error)


class _Hook:
    """A forward hook that reaches the kept calls and the module weakly."""

    def __init__(self, kept: KeptCalls, name: str, module: nn.Module) -> None:
        self._kept, self._name, self._module = weakref.ref(kept), name, weakref.ref(module)

    def before(self, hooked: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # Compiled code must not break its graph here.
        module = self._module()
        kept = self._kept()
        if module is None or kept is None:
            return
        try:
            kept.begin(module, self._name, args, kwargs, compiled=hooked is not module)
        except Exception as error:  # noqa: BLE001 # tensors of any kind may raise anything
            kept.spare(error)

    def after(self, hooked: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del hooked, args
        if torch.compiler.is_compiling() or (kept := self._kept()) is None:
            return
        try:
            kept.end(output)
        except Exception as error:  # noqa: BLE001 # as above
            kept.spare(error)


def _called(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a script calls, by name: the root, or its children if it has no forward pass."""
    modules = named_modules(model)
    pending = [ROOT]
    for name in pending:
        module = modules[name]
        # Scripted modules have `forward` in the object, not in the class.
        if getattr(type(module), "forward", None) is not nn.Module.forward:
            yield name, module
            continue
        prefix = "" if name == ROOT else f"{name}."
        inner = (f"{prefix}{key}" for key, _ in module.named_children())
        pending += [name for name in inner if name in modules]


def _buffers(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Return name, table and key of each buffer that a forward pass may change: a large one is a mask or a table."""
    return [
        (f"{prefix}.{key}" if prefix else key, inner._buffers, key)  # noqa: SLF001 # where modules keep them
        for prefix, inner in module.named_modules()
        for key, buffer in inner._buffers.items()  # noqa: SLF001 # as above
        if buffer is not None and buffer.numel() <= _LARGEST_BUFFER
    ]
