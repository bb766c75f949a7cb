"""Keeps the calls of a model while it trains, so that a failed step can be run again. Nothing waits for a device."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurgeon.forensics.kept_step import MOST_CALLS, KeptCall, KeptLoss, KeptStep, fingerprint
from gradsurgeon.forensics.loss_line import LossLine
from gradsurgeon.forensics.undisturbed import RandomState
from gradsurgeon.language.planning import ROOT, class_names, is_scripted, named_modules
from gradsurgeon.tensors import _backward_calls, _torch, _unsaved_hooks
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.structure import Copied, Path, tensors_in

# The size of the random states; Python keeps each of 625 words as an object.
_RANDOM_BYTES = 50_000
# The name of the tag by which a script tells the numbers of the samples in its batch.
SAMPLE_IDS = "sample_ids"
# A forward pass that writes into a larger buffer differs in the replay.
_LARGEST_BUFFER = 2**16
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# A batch with more samples is not known by numbers.
_MOST_SAMPLES = 2**16


_Method = TypeVar("_Method", bound=Callable[..., None])


def _spared(method: _Method) -> _Method:
    """Return a method of `KeptCalls` that notes errors instead of raising them in the script: the call is then not kept."""

    @wraps(method)
    def run(kept: "KeptCalls", *args: Any, **kwargs: Any) -> None:
        try:
            method(kept, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 # tensors of any kind may raise anything
            kept.step.dropped += 1
            kept.step.problem = f"{type(error).__name__}: {error}"

    return cast("_Method", run)


class KeptCalls:
    """Keeps the calls of one model until the step ends that they feed."""

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        self._is_paused = is_paused
        # The number of calls in evaluation mode without gradients; `None` if calls were never seen.
        self.evaluations: int | None = None
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.step = KeptStep()
        # A step whose decision is not known yet.
        self._held: KeptStep | None = None
        # The number of backward passes of this step that have reached parameters.
        self.reaching = 0
        # Whether a backward pass has begun and not reached a call yet.
        self._begins = False
        self._handles: list[RemovableHandle] = []
        self._buffers: dict[str, list[tuple[str, dict[str, Any], str]]] = {}
        self._devices: list[str] = []
        self._kinds = {"cpu"}
        # The calls that run, outermost first. Only the outermost one is kept.
        self._running: list[KeptCall | None] = []
        # The numbers of samples that the script tagged since the last update, by batch, and those of the next pass.
        self.sample_ids: list[Tensor] = []
        self._ids_of_pass: Tensor | None = None
        # Whether the calls are those of a replay.
        self._is_resting = False
        self.loss_line = LossLine()

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self.model = weakref.ref(model)
        if self.evaluations is None:
            self.evaluations = 0
        self._devices = []
        self._kinds = {"cpu"}
        for device in {param.device for param in model.parameters()}:
            if _has_random_state(device):
                self._devices.append(str(device))
                self._kinds.add(device.type)
        for name, module in _called(model):
            if is_scripted(class_names(module)):
                continue  # Its code calls no hooks.
            self._buffers[name] = _buffers(module)
            hooked = module
            if name == ROOT and type(model).__name__ == "OptimizedModule":
                # Compiled code calls no hook of ours, but hooks around it see its calls. A replay runs without it.
                hooked = model
            before, after = _hooks(self, name, module)
            # It comes before hooks of the script, which a replay runs as well.
            handles = (
                hooked.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                hooked.register_forward_hook(after, always_call=True),
            )
            for handle in handles:
                _unsaved_hooks.leave_behind(handle)
                self._handles.append(handle)
        self._forget()

    def detach(self) -> None:
        while self._handles:
            _unsaved_hooks.take_off(self._handles.pop())
        self._forget()

    def close(self) -> None:
        self.detach()
        self.loss_line.close()

    def _forget(self) -> None:
        self.step = KeptStep(earlier=self._held)
        self.reaching = 0

    @property
    def loss_of_pass(self) -> KeptLoss | None:
        """The loss of the backward pass that runs or has run last, ``None`` if it was not kept."""
        return self.step.losses.get(self.step.passes + self._begins)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Keep nothing of the calls of a replay."""
        self._is_resting = True
        try:
            yield
        finally:
            self._is_resting = False

    def hold(self) -> KeptStep:
        """Return what is kept of this step until `release`, for a decision that comes after the calls of the next step."""
        step = self.step
        # Passes of a later update may change the lists.
        self._held = replace(step, calls=[*step.calls], losses={**step.losses})
        return self._held

    def end_held(self) -> None:
        """Note the calls after a step that is held: they have moved buffers since."""
        if self._held is not None:
            held = self._held.calls
            self._held.later = [call for call in self.step.calls if call not in held]

    def release(self) -> None:
        self._held = None
        self.step.earlier = None

    def updated(self) -> None:
        """Note an update. Until the model is called again, the calls may feed the update of another optimizer."""
        self.sample_ids = []
        self._ids_of_pass = None
        self.step.updated = bool(self._handles)
        self.loss_line.updated()

    def keep_sample_ids(self, tensor: Any) -> None:
        """Keep a copy of integers of shape [n], which the script may write over. Nothing waits for the device."""
        if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
            return
        held = readable(tensor)
        if held is None or held.layout != torch.strided or held.dim() != 1:
            return
        if len(held) <= _MOST_SAMPLES and len(self.sample_ids) < MOST_CALLS:
            self._ids_of_pass = held.clone()
            self.sample_ids.append(self._ids_of_pass)

    @_spared
    def begin(
        self, module: nn.Module, name: str, args: Any, kwargs: dict[str, Any], *, compiled: bool
    ) -> None:
        self._running.append(None)
        if len(self._running) > 1 or self._is_resting:
            return
        if self.step.updated:
            self._forget()
        if not torch.is_grad_enabled():
            if not module.training and self.evaluations is not None:
                self.evaluations += 1
            return
        if torch._C._get_tracing_state() is not None:  # noqa: SLF001 # the public name has no types
            return
        if self._is_paused():
            self.step.problem = "the session was paused"
            return
        only_tensors = set(map(type, args)) == {Tensor}
        if only_tensors and not kwargs:  # nearly always: nothing needs a copy
            iterators: list[str] = []
            inputs = list(args)
        else:
            # The script may change its dicts and lists later.
            copied = Copied((args, kwargs))
            args, kwargs = copied.value
            iterators = copied.iterators
            inputs = [tensor for _, tensor in tensors_in(copied.value)]
        call = KeptCall(
            weakref.ref(module),
            name,
            args,
            kwargs,
            RandomState.now(self._devices),
            self._copied_buffers(name),
            self._autocast(),
            compiled=compiled,
            iterators=tuple(iterators),
            first_node=_torch.next_node_number(),
        )
        call.bytes = _RANDOM_BYTES
        for tensor in (*inputs, *call.buffers.values()):
            call.bytes += tensor.numel() * tensor.element_size()
        self._running[-1] = call

    def _copied_buffers(self, name: str) -> dict[str, Tensor]:
        copies = {}
        for path, table, key in self._buffers[name]:
            if key not in table:  # the tables of scripted modules have no `get`
                continue
            buffer = table[key]
            if buffer is not None and readable(buffer) is not None:
                copies[path] = buffer.detach().clone()
        return copies

    def _autocast(self) -> dict[str, tuple[bool, torch.dtype]]:
        """Return, by kind of device, whether autocast is on, and its dtype."""
        states = {}
        for kind in self._kinds:
            states[kind] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        return states

    @_spared
    def end(self, output: Any) -> None:
        if not self._running:
            return
        call = self._running.pop()
        if call is None or output is None:
            return  # Without output the call has raised, or returned nothing.
        for path, tensor in tensors_in(output):
            if not (tensor.requires_grad or tensor.is_floating_point()):
                continue
            output_fingerprint = fingerprint(tensor)
            if output_fingerprint is not None:
                _, sample = output_fingerprint
                call.outputs[path] = output_fingerprint
                call.versions[path] = _torch.writes(sample)
                call.bytes += sample.nbytes
            node = tensor.grad_fn
            if node is not None:
                keep = partial(self._keep, weakref.ref(call), path, tensor.output_nr)
                node.register_prehook(keep)
                call.last_node = max(call.last_node, node._sequence_nr())  # noqa: SLF001 # no public name
        self.step.calls.append(call)
        self.step.shorten()

    @_spared
    def keep_loss(self, graph: BackwardGraph, *, accumulates: bool) -> None:
        """Keep the graph from the outputs of the calls to the loss of a backward pass that begins.

        ``accumulates`` tells whether a parameter that it reaches has a gradient already.
        """
        self._begins = True
        self.loss_line.look(graph)
        step = self.step
        for call in step.calls:
            if not call.number:
                call.sample_ids = self._ids_of_pass
        self._ids_of_pass = None
        if self.reaching and not accumulates:
            # The script has cleared the gradients of earlier passes.
            step.calls = [call for call in step.calls if not call.number]
            step.losses.clear()
        if step.calls and not self._is_paused():
            step.keep_loss(graph, self.loss_line.pass_key)

    @_spared
    def _keep(
        self, call: weakref.ref[KeptCall], path: Path, output_number: int, grads: Any
    ) -> None:
        """Keep the gradient of one output: the hook of the node that made the output gets the gradients of all."""
        kept = call()
        if _backward_calls.is_only_grad():
            return  # `torch.autograd.grad` is not training.
        if self._begins:
            self._begins = False
            self.step.passes += 1
        if kept is None or grads[output_number] is None:
            return
        grad = grads[output_number].detach()
        kept.bytes += grad.numel() * grad.element_size()
        if path in kept.grads:
            # Several passes through one output add up, as they do in the parameters.
            grad = kept.grads[path] + grad
        kept.grads[path] = grad
        if self.step.passes not in kept.numbers:
            kept.numbers.append(self.step.passes)
        self.step.shorten()


def _hooks(
    kept: KeptCalls, name: str, module: nn.Module
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks for before and after a forward pass, which reach the kept calls and the module weakly."""
    kept_ref = weakref.ref(kept)
    module_ref = weakref.ref(module)

    def before(hooked: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # Compiled code must not break its graph here.
        kept = kept_ref()
        module = module_ref()
        if kept is not None and module is not None:
            kept.begin(module, name, args, kwargs, compiled=hooked is not module)

    def after(hooked: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del hooked, args
        if torch.compiler.is_compiling():
            return
        kept = kept_ref()
        if kept is not None:
            kept.end(output)

    return before, after


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
        for key, _ in module.named_children():
            child = f"{name}.{key}".lstrip(".")
            if child in modules:
                pending.append(child)


def _buffers(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Return name, table and key of each buffer that a forward pass may change: a large one is a mask or a table."""
    places = []
    for path, inner in module.named_modules():
        table = inner._buffers  # noqa: SLF001 # where modules keep them
        for key, buffer in table.items():
            if buffer is not None and buffer.numel() <= _LARGEST_BUFFER:
                places.append((f"{path}.{key}".lstrip("."), table, key))
    return places


def _has_random_state(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return False
    return hasattr(torch.get_device_module(device), "get_rng_state")
