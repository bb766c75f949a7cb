"""Runs the calls of a failed step again under probes, and leaves the training as it was."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradsurgeon.distributed.fully_shard import Cast, casts
from gradsurgeon.forensics.kept_step import Fingerprint, KeptCall
from gradsurgeon.forensics.operations import nonfinite_kind
from gradsurgeon.forensics.provenance import ModuleCalls, Provenance
from gradsurgeon.forensics.sources import Source, is_intended
from gradsurgeon.forensics.undisturbed import exchanged, undisturbed
from gradsurgeon.planning import named_modules, slots
from gradsurgeon.tensors.structure import Copied, Path, parameters_of, tensors_in

# The prefix of inputs among the names of tensors with gradients.
INPUT = "input "
# Anomaly mode, hooks on all modules and random numbers belong to the whole process.
_one_at_a_time = threading.RLock()
# Each is called with the name of a tag and the tensor while a call is replayed, if rules act on tags.
shown_to: list[Callable[[str, Tensor], None]] = []


@dataclass(slots=True)
class Replayed:
    """The result of running one call again.

    Attributes:
        call: the call.
        sources: the sources of non-finite gradients, by name of the parameter.
        outputs: NaN or Inf, and the source, of non-finite outputs by path.
        modules: the sources of non-finite outputs of modules, by name, in the first call of each.
        grads: the non-finite gradients of outputs, by path.
        differs: the outputs with another sample than in the call, by path, and whether they are close.
        is_compared: whether a finite number of an output was compared, and is equal.
        moved: the buffers before and after the replay, by name.
        left: the objects that the replay has changed and could not put back.
        error: the exception of the replay.
    """

    call: KeptCall
    sources: dict[str, Source] = field(default_factory=dict)
    outputs: dict[Path, tuple[str, Source]] = field(default_factory=dict)
    modules: dict[str, Source] = field(default_factory=dict)
    grads: dict[Path, Source] = field(default_factory=dict)
    differs: dict[Path, bool] = field(default_factory=dict)
    is_compared: bool = False
    moved: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    error: Exception | None = None


def replay(call: KeptCall, *, stop_at: int = 0) -> Replayed:
    """Run a call and its backward pass again.

    Args:
        call: the call.
        stop_at: the moment of the birth at which to open `pdb`.
    """
    module = call.module()
    found = Replayed(call)
    if module is None or call.iterators:
        return found
    try:
        with (
            _one_at_a_time,
            undisturbed(module, call) as found.left,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            _run(module, call, found, stop_at)
    except Exception as error:  # noqa: BLE001 # the code of the script may raise anything
        found.error = error
    return found


def _run(module: nn.Module, call: KeptCall, found: Replayed, stop_at: int) -> None:
    params: dict[str, Tensor] = {}
    for name, own in module.named_parameters():
        weight = call.weights.get(name, own)
        params[name] = weight.detach().requires_grad_(weight.requires_grad)
    buffers = {
        name: call.weights.get(name, buffer).detach().clone()
        for name, buffer in module.named_buffers()
    }
    buffers.update({name: copy.clone() for name, copy in call.buffers.items()})
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    for name, inner in module.named_modules():
        inner.training = call.training.get(name, inner.training)
    # Copies without their graph, so the forward pass may write to them.
    args, kwargs = Copied(
        (call.args, call.kwargs), lambda t: t.detach().clone().requires_grad_(t.requires_grad)
    ).value
    inputs = {spelled_input(call, path): tensor for path, tensor in tensors_in([args, kwargs])}
    modules = ModuleCalls()
    provenance = Provenance(modules, stop_at)
    provenance.memory.made((*buffers.values(), *inputs.values()))
    for name, param in params.items():
        provenance.seed("weight", name, param)
    for name, buffer in buffers.items():
        provenance.seed("buffer", name, buffer)
    for name, tensor in inputs.items():
        provenance.seed("input", name, tensor)
    leaves = _leaves(module, call, params, inputs)

    def came_out(name: str, output: Any) -> None:
        for _, tensor in tensors_in(output):
            source = provenance.source_of(tensor)
            if source is not None and not is_intended(source):
                found.modules.setdefault(name, source)

    with ExitStack() as stack:
        stack.enter_context(_module_calls(module, modules, came_out))
        stack.enter_context(_as_then(module, call))
        # Checkpoints run parts of the forward pass in the backward pass.
        stack.enter_context(exchanged(module, params, buffers))
        shown_to.append(came_out)
        stack.callback(shown_to.remove, came_out)
        stack.callback(provenance.memory.restore)
        with provenance:
            output = module(*args, **kwargs)
        outputs = dict(tensors_in(output))
        _compare(call, outputs, provenance, found)
        _go_back(call, outputs, leaves, provenance, found)
        # Checkpoints change buffers once more in the backward pass, as they did in the step.
        found.moved = {
            name: (before[name], buffer.detach())
            for name, buffer in module.named_buffers()
            if name in before
        }


def _leaves(
    module: nn.Module, call: KeptCall, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the copies that get gradients, parameters by canonical name in the model of the session."""
    canonical = {id(slot.owner._parameters[slot.key]): slot.name for slot in slots(module)}  # noqa: SLF001 # where modules keep them
    leaves = {
        call.prefix + canonical.get(id(param), name): params[name]
        for name, param in module.named_parameters()
    }
    return leaves | {f"{INPUT}{name}": tensor for name, tensor in inputs.items()}


@contextmanager
def _as_then(module: nn.Module, call: KeptCall) -> Iterator[None]:
    """Set casts, autocast and grad mode of the call, and anomaly mode, which knows the lines of nodes."""
    with ExitStack() as stack:
        # `fully_shard` casts by itself in a model that is still divided.
        stack.enter_context(_cast(module, {} if casts(module) else call.casts))
        for kind, (enabled, dtype) in call.autocast.items():
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        if "torch._dynamo" in sys.modules:
            # Without it nothing is compiled, and importing the compiler takes seconds.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _compare(
    call: KeptCall, outputs: Mapping[Path, Tensor], provenance: Provenance, found: Replayed
) -> None:
    for path, kept in call.outputs.items():
        tensor = outputs.get(path)
        if tensor is None or tuple(tensor.shape) != kept.shape:
            found.differs[path] = False
            continue
        sample = Fingerprint.of(tensor).sample
        if sample.is_floating_point() and kept.sample.is_floating_point():
            # A later hook may have cast the output.
            sample = sample.to(kept.sample.dtype)
        if kept.is_overwritten:
            found.differs[path] = True
        elif sample.dtype != kept.sample.dtype:
            found.differs[path] = False
        elif not torch.equal(sample.nan_to_num(7.0), kept.sample.nan_to_num(7.0)):
            found.differs[path] = bool(
                torch.allclose(sample, kept.sample, rtol=1e-3, atol=1e-5, equal_nan=True)
            )
        else:
            found.is_compared |= bool(sample.isfinite().any())
    for path, tensor in outputs.items():
        if (source := provenance.source_of(tensor)) is not None:
            found.outputs[path] = nonfinite_kind(tensor), source


def _go_back(
    call: KeptCall,
    outputs: Mapping[Path, Tensor],
    named: Mapping[str, Tensor],
    provenance: Provenance,
    found: Replayed,
) -> None:
    """Run the backward pass from the kept gradients of the outputs."""
    driven = {
        path: grad
        for path, grad in call.grads.items()
        if path in outputs and outputs[path].grad_fn is not None
    }
    driven = _outermost(driven, outputs)
    leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    if not (driven and leaves):
        return
    for path, grad in driven.items():
        origin = provenance.seed("output gradient", _spelled(path).lstrip("."), grad)
        if origin is not None:
            found.grads[path] = origin
    with provenance:
        # No watch over backward passes sees this pass, and only the copies get gradients. A reentrant checkpoint
        # refuses that, and names the remedy.
        torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001 # what `backward` calls
            tuple(outputs[path] for path in driven),
            tuple(driven.values()),
            False,
            False,
            tuple(leaves.values()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    for name, leaf in leaves.items():
        if leaf.grad is not None and (source := provenance.source_of(leaf.grad)) is not None:
            found.sources[name] = source


def _outermost(grads: Mapping[Path, Tensor], outputs: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    """Leave out outputs that another output was made of: their gradient contains the gradient through it."""
    inner: set[Any] = set()
    for path in grads:
        inner |= _nodes_below(outputs[path])
    return {path: grad for path, grad in grads.items() if outputs[path].grad_fn not in inner}


def _nodes_below(tensor: Tensor) -> set[Any]:
    """Return the nodes of the graph below the node of a tensor."""
    start: Any = tensor.grad_fn
    pending, met = [node for node, _ in start.next_functions if node is not None], set()
    while pending:
        node = pending.pop()
        if node not in met:
            met.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
    return met


@contextmanager
def _module_calls(
    root: nn.Module, calls: ModuleCalls, came_out: Callable[[str, Any], None]
) -> Iterator[None]:
    names: dict[int, str] = {}
    for name, module in named_modules(root).items():
        names.setdefault(id(module), name)

    def before(module: nn.Module, args: Any) -> None:
        del args
        if id(module) in names:
            calls.enter(names[id(module)], type(module).__name__)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        del args
        if id(module) in names:
            calls.leave()
            came_out(names[id(module)], output)

    handles = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _cast(root: nn.Module, around: Mapping[str, Cast]) -> Iterator[None]:
    """Cast around modules as `fully_shard` did, in a model that is not divided."""
    named = named_modules(root)
    handles: list[Any] = []
    for name, cast in around.items():
        module = named[name]
        handles += (
            module.register_forward_pre_hook(cast.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(cast.after),
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _spelled(path: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def spelled_input(call: KeptCall, path: Sequence[int | str]) -> str:
    """Return the name of a tensor among the arguments: ``x``, or ``batch.image[0]``."""
    module = call.module()
    keyword, first, *rest = path
    if keyword == 0 and module is not None:
        names = parameters_of(module.forward)
        if isinstance(first, int) and first < len(names):
            known = names[first]
            first = known.name if known.kind is not known.VAR_POSITIONAL else first
    return (
        f"{first}{_spelled(rest)}"
        if isinstance(first, str)
        else f"argument {first}{_spelled(rest)}"
    )
