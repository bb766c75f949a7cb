"""Keeps the calls of a model while it trains, so that a failed step can be run again.

Inputs and gradients of outputs are kept by reference. Random states and the buffers that the forward pass
changes are copied. Nothing waits for a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _backward_calls, _torch
from gradsurgeon.errors import printable
from gradsurgeon.forensics.kept_step import (
    Fingerprint,
    HostRandom,
    KeptCall,
    KeptLoss,
    torch_random,
)
from gradsurgeon.planning import ROOT, class_names, is_scripted, named_modules
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.structure import Copied, Path, tensors_in

# The bound on kept tensors of one step: beyond it the oldest calls are dropped first.
MAX_BYTES = 256 * 2**20
MOST_CALLS = 256
_SCRIPTED = "torch.jit runs {of}, and calls no hook there; train without torch.jit.script to find where the NaN or Inf was born"


class _Open(threading.local):
    """The calls that run in a thread, outermost first. Only the outermost one is kept."""

    def __init__(self) -> None:
        self.calls: list[KeptCall | None] = []
        # In the first call of a module: its buffers before the call, with the number of writes to each.
        self.buffers: dict[str, tuple[Tensor, int]] = {}


class KeptCalls:
    """Keeps the calls of one model until the step ends that they feed.

    If the root of the model has no forward pass of its own, the calls of the modules in it are kept.
    """

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        # While the session is paused, no call is kept.
        self._is_paused = is_paused
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.calls: list[KeptCall] = []
        # Number of calls of this step that were dropped because of their size.
        self.dropped = 0
        # Why a call could not be kept at all.
        self.problem = self._unseen = ""
        # Backward passes of this step through the calls, and backward passes that have reached parameters.
        self.passes = self.reaching = 0
        self._begins = False
        # Whether an update came after the calls, and another one may.
        self.is_updated = False
        self.losses: dict[int, KeptLoss] = {}
        self._handles: list[RemovableHandle] = []
        # By called module and mode: the buffers that its forward pass changes, with their place in a module. They
        # are known once the first call has ended.
        self._changing: dict[tuple[str, bool], dict[str, tuple[dict[str, Any], str]]] = {}
        self._devices: tuple[torch.device, ...] = ()
        self._open = _Open()

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self.model = weakref.ref(model)
        self._changing.clear()
        self._unseen = ""
        devices = {param.device for param in model.parameters()}
        self._devices = tuple(
            device
            for device in devices
            if device.type not in ("cpu", "meta")
            and hasattr(torch.get_device_module(device), "get_rng_state")
        )
        for name, module in _called(model):
            if is_scripted(class_names(module)):
                self._unseen = _SCRIPTED.format(of="the model" if name == ROOT else printable(name))
                continue
            # Compiled code calls no hook of ours, but hooks around it see its calls. A replay runs without it.
            compiled = name == ROOT and type(model).__name__ == "OptimizedModule"
            hooked = model if compiled else module
            hook = _Hook(self, name, module)
            handles = [
                # It comes before hooks of the script, which a replay runs as well.
                hooked.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True),
                hooked.register_forward_hook(hook.after, always_call=True),
            ]
            for handle in handles:
                _torch.leave_behind(handle)
            self._handles += handles
        self.problem = self._unseen

    def detach(self) -> None:
        while self._handles:
            _torch.take_off(self._handles.pop())
        self.forget()

    def updated(self, is_awaited: Callable[[], bool]) -> None:
        """Note an update. Until the model is called again, the calls may feed the update of another optimizer.

        Args:
            is_awaited: tells whether there will be such an update.
        """
        # The question goes through all parameters, so it is asked only if calls are kept.
        self.is_updated = bool(self._handles)
        if self.is_updated and not is_awaited():
            self.forget()

    def forget(self) -> None:
        """Drop everything that was kept for a step."""
        self.is_updated = False
        self.calls, self.dropped, self.losses = [], 0, {}
        self.passes = self.reaching = 0
        self.problem = self._unseen

    def begin(
        self, module: nn.Module, name: str, args: Any, kwargs: dict[str, Any], *, compiled: bool
    ) -> None:
        self._open.calls.append(None)
        outermost = len(self._open.calls) == 1
        if outermost and self.is_updated:
            self.forget()
        tracing = torch._C._get_tracing_state() is not None  # noqa: SLF001 # the public name has no types
        if not outermost or not torch.is_grad_enabled() or tracing:
            return
        if self._is_paused():
            self.problem = "the session was paused"
            return
        key = name, module.training
        if key not in self._changing:
            self._open.buffers = {name: (b, _torch.writes(b)) for name, b in module.named_buffers()}
        # The script may change its dicts and lists later.
        copied = Copied((args, kwargs))
        args, kwargs = copied.value
        tensors: list[tuple[Any, Tensor]] = list(tensors_in([args, kwargs]))
        call = KeptCall(
            weakref.ref(module),
            name,
            args,
            kwargs,
            {path: _torch.writes(tensor) for path, tensor in tensors},
            torch_random(map(str, self._devices)),
            self._buffers(module, key),
            _autocast(self._devices),
            compiled=compiled,
            host=HostRandom.now(),
            iterators=tuple(copied.iterators),
        )
        tensors += [*call.random.items(), *call.buffers.items()]
        call.bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        call.bytes += call.host.nbytes
        self._open.calls[-1] = call

    def end(self, module: nn.Module, output: Any) -> None:
        call = self._open.calls.pop() if self._open.calls else None
        if call is None:
            return
        if (call.name, module.training) not in self._changing:
            before, self._open.buffers = self._open.buffers, {}
            self._changing[call.name, module.training] = {
                name: (table, key)
                for name, table, key in _buffer_places(module)
                if name not in before
                # Kernels write running statistics without counting; the number of batches is counted.
                or (module.training and "num_batches_tracked" in table)
                or before[name][0] is not table[key]
                or before[name][1] != _torch.writes(table[key])
            }
        if output is None:
            return  # The call has raised, or returned nothing.
        for path, tensor in tensors_in(output):
            if not (tensor.requires_grad or tensor.is_floating_point()):
                continue
            call.outputs[path] = Fingerprint.of(tensor)
            sample = call.outputs[path].sample
            call.bytes += sample.numel() * sample.element_size()
            if (node := tensor.grad_fn) is not None:
                keep = partial(self._keep, weakref.ref(call), path, tensor.output_nr)
                node.register_prehook(keep)
                call.last_node = max(call.last_node, node._sequence_nr())  # noqa: SLF001 # no public name
        self.calls.append(call)
        self._shorten()

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Keep errors of our own from the script: the call is then not kept."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 # tensors of any kind may raise anything
            self.dropped += 1
            self.problem = f"{type(error).__name__}: {error}"

    def keep_loss(self, graph: BackwardGraph, *, accumulates: bool) -> None:
        """Keep the graph from the outputs of the calls to the loss of a backward pass that begins.

        Args:
            graph: the graph of the pass.
            accumulates: whether a parameter that it reaches has a gradient already.
        """
        self._begins = True
        if self.reaching and not accumulates:
            # The script has cleared the gradients of earlier passes.
            self.calls = [call for call in self.calls if not call.number]
            self.losses.clear()
        if self.calls and not self._is_paused():
            last = max(call.last_node for call in self.calls)
            loss = KeptLoss.of(graph, last)
            # A diagnosis needs the calls more than the loss.
            if self._bytes() + loss.bytes <= MAX_BYTES:
                self.losses[self.passes + 1] = loss

    def _keep(self, call: weakref.ref[KeptCall], path: Path, number: int, grads: Any) -> None:
        if _backward_calls.is_only_grad():
            return  # `torch.autograd.grad` is not training.
        if self._begins:
            self._begins = False
            self.passes += 1
        kept, grad = call(), grads[number]
        if kept is None or grad is None:
            return
        with self.spared():
            # Several passes through one output add up, as they do in the parameters.
            grad = grad.detach()
            kept.grads[path] = kept.grads[path] + grad if path in kept.grads else grad
            kept.number = kept.number or self.passes
            kept.bytes += grad.numel() * grad.element_size()
            self._shorten()

    def _shorten(self) -> None:
        if self.losses and self._bytes() > MAX_BYTES:
            self.losses.clear()
        while len(self.calls) > MOST_CALLS or (self.calls and self._bytes() > MAX_BYTES):
            self.calls.pop(0)
            self.dropped += 1

    def _bytes(self) -> int:
        losses = sum(loss.bytes for loss in self.losses.values())
        return sum(call.bytes for call in self.calls) + losses

    def _buffers(self, module: nn.Module, key: tuple[str, bool]) -> dict[str, Tensor]:
        """Return copies of the buffers that the call may change."""
        if (changing := self._changing.get(key)) is None:
            there = dict(module.named_buffers())
        else:
            # The tables of scripted modules have no `get`.
            there = {
                name: table[key]
                for name, (table, key) in changing.items()
                if key in table and table[key] is not None
            }
        return {name: buffer.detach().clone() for name, buffer in there.items()}


class _Hook:
    """A forward hook that reaches the kept calls and the module weakly."""

    def __init__(self, kept: KeptCalls, name: str, module: nn.Module) -> None:
        self._kept, self._name, self._module = weakref.ref(kept), name, weakref.ref(module)

    def before(self, hooked: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Compiled code must not break its graph here.
        if torch.compiler.is_compiling():
            return
        kept, module = self._kept(), self._module()
        if kept is not None and module is not None:
            with kept.spared():
                kept.begin(module, self._name, args, kwargs, compiled=hooked is not module)

    def after(self, hooked: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Act after a call, also if it has raised."""
        del hooked, args
        if torch.compiler.is_compiling():
            return
        kept, module = self._kept(), self._module()
        if kept is not None and module is not None:
            with kept.spared():
                kept.end(module, output)


def _called(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a script calls, by name: the root, or its children if it has no forward pass."""
    modules: Mapping[str, nn.Module] = named_modules(model)
    pending = [ROOT]
    while pending:
        name = pending.pop(0)
        module = modules[name]
        # Scripted modules have `forward` in the object, not in the class.
        if getattr(type(module), "forward", None) is not nn.Module.forward:
            yield name, module
            continue
        prefix = "" if name == ROOT else f"{name}."
        pending += [
            inner
            for inner in (f"{prefix}{key}" for key, _ in module.named_children())
            if inner in modules
        ]


def _buffer_places(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for prefix, inner in module.named_modules():
        for key, buffer in inner._buffers.items():  # noqa: SLF001 # where modules keep them
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, inner._buffers, key  # noqa: SLF001 # as above


def _autocast(devices: tuple[torch.device, ...]) -> dict[str, tuple[bool, torch.dtype]]:
    kinds = {"cpu", *(device.type for device in devices)}
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    }
