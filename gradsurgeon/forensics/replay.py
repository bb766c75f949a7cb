"""Runs the calls of a failed step again under probes, and leaves the training as it was."""

import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.actions import spelled
from gradsurgeon.forensics.kept_step import (
    INPUT,
    FailedStep,
    Fingerprint,
    KeptCall,
    fingerprint,
)
from gradsurgeon.forensics.loss_line import noted_lines
from gradsurgeon.forensics.operations import ModuleCalls, nonfinite_kind
from gradsurgeon.forensics.provenance import Provenance
from gradsurgeon.forensics.sources import NonfiniteSource
from gradsurgeon.forensics.undisturbed import exchanged, undisturbed
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.structure import Copied, Path, tensors_in

_FREED = "an argument of the call has no numbers any more, such as a parameter that fully_shard has freed"
# Anomaly mode, hooks on all modules and random numbers belong to the whole process.
_one_at_a_time = threading.RLock()
_UNCHANGED = nullcontext()
# Calls a function with the name and the tensor of each tag, as long as the context is open.
WatchTags = Callable[[Callable[[str, Tensor], None]], AbstractContextManager[object]]


@dataclass(slots=True)
class Replayed:
    """The result of running one call again.

    Attributes:
        gradients: the sources of non-finite gradients, by name of the parameter or input.
        outputs: NaN or Inf, and the source, of non-finite outputs by path.
        modules: the sources of non-finite outputs of modules, by name, in the first call of each.
        returned: the outputs whose gradient was non-finite when it came back.
        compared: how outputs compare with those of the call: ``equal``, ``near`` or ``other``.
        numbers: the outputs that are one number with a gradient, such as a loss.
    """

    call: KeptCall
    gradients: dict[str, NonfiniteSource] = field(default_factory=dict)
    outputs: dict[Path, tuple[str, NonfiniteSource]] = field(default_factory=dict)
    modules: dict[str, NonfiniteSource] = field(default_factory=dict)
    returned: set[Path] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    numbers: list[Tensor] = field(default_factory=list)
    error: Exception | None = None


def replay(
    call: KeptCall,
    watch_tags: WatchTags,
    *,
    stop_at: int = 0,
    changed: AbstractContextManager[object] = _UNCHANGED,
) -> Replayed:
    """Run a call and its backward pass again; open `pdb` at the birth with the moment ``stop_at``.

    ``changed`` is open meanwhile, and may change the arguments of operations.
    """
    module = call.module()
    replayed = Replayed(call)
    if module is None or call.iterators:
        return replayed
    try:
        with _one_at_a_time, undisturbed(module, call.random), warnings.catch_warnings(), changed:
            warnings.simplefilter("ignore")
            _run(module, replayed, watch_tags, stop_at)
    except Exception as error:  # noqa: BLE001 # the code of the script may raise anything
        replayed.error = error
    return replayed


def _run(module: nn.Module, replayed: Replayed, watch_tags: WatchTags, stop_at: int) -> None:
    call = replayed.call
    modules = ModuleCalls()
    provenance = Provenance(modules, stop_at)
    params = dict(_then(module.named_parameters(), call.weights))
    buffers = {}
    for name, buffer in _then(module.named_buffers(), {**call.weights, **call.buffers}):
        buffers[name] = buffer.clone()
    args, kwargs = Copied((call.args, call.kwargs), _own_copy).value
    inputs = replace(call, args=args, kwargs=kwargs).inputs
    provenance.memory.add_own((*buffers.values(), *inputs.values()))
    given = {"weight": params, "buffer": buffers, "input": inputs}
    for what, named in given.items():
        for name, tensor in named.items():
            provenance.seed(what, name, tensor)

    def came_out(name: str, output: Any) -> None:
        for _, tensor in tensors_in(output):
            source = provenance.source_of(tensor)
            if source is not None and not source.intended:
                replayed.modules.setdefault(name, source)

    leaves = {f"{INPUT}{name}": tensor for name, tensor in inputs.items()}
    leaves.update({call.prefix + name: param for name, param in params.items()})
    with modules.watched(module, came_out), ExitStack() as stack:
        _enter(stack, call, module)
        # Checkpoints run parts of the forward pass in the backward pass.
        stack.enter_context(exchanged(module, {**params, **buffers}))
        stack.enter_context(watch_tags(came_out))
        stack.callback(provenance.memory.restore)
        with provenance:
            output = module(*args, **kwargs)
        outputs = dict(tensors_in(output))
        _judge_outputs(replayed, outputs, provenance)
        _run_backward(replayed, outputs, leaves, provenance)
        # Checkpoints change buffers once more in the backward pass, as they did in the step.
        replayed.buffers = {name: buffer.detach() for name, buffer in module.named_buffers()}


def run_again(failed: FailedStep) -> None:
    """Run the calls of a step on their models themselves, forward and backward, with all hooks. Gradients stay there."""
    first_calls = {call.name: call for call in reversed(failed.kept.calls)}
    for name, call in first_calls.items():
        failed.called[name].load_state_dict({**call.weights, **call.buffers}, strict=False)
    # The gradients of a pass come together.
    passes: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for call in failed.kept.calls:
        module = failed.called[call.name]
        call.random.set()
        with ExitStack() as stack:
            _enter(stack, call, module)
            args, kwargs = Copied((call.args, call.kwargs), _own_copy).value
            outputs = dict(tensors_in(module(*args, **kwargs)))
        for path, grad in call.grads.items():
            passes[call.number].append((outputs[path], grad / (failed.scale or 1)))
    for ends in passes.values():
        tensors, grads = zip(*ends, strict=True)
        torch.autograd.backward(tensors, grads)


def _then(
    named: Iterable[tuple[str, Tensor]], kept: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters or buffers as they were at a call, by name and without their graph."""
    for name, tensor in named:
        weight = kept.get(name, tensor)
        yield name, weight.detach().requires_grad_(weight.requires_grad)


def _own_copy(tensor: Tensor) -> Tensor:
    """Return a copy of an argument without its graph, so the forward pass may write to it."""
    if _torch.is_freed(tensor):
        raise RuntimeError(_FREED)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _judge_outputs(
    replayed: Replayed, outputs: Mapping[Path, Tensor], provenance: Provenance
) -> None:
    """Compare the outputs with those of the call, and note the sources of non-finite ones."""
    for path, kept in replayed.call.outputs.items():
        replayed.compared |= _compared(kept, outputs.get(path))
    for path, tensor in outputs.items():
        source = provenance.source_of(tensor)
        if source is not None:
            replayed.outputs[path] = (nonfinite_kind(tensor), source)
        if not tensor.dim() and path in replayed.call.grads:
            replayed.numbers.append(tensor.detach())


def _compared(kept: Fingerprint, tensor: Tensor | None) -> set[str]:
    """Compare an output with the output of the call; return nothing if no finite number can be compared."""
    now = None
    if tensor is not None:
        now = fingerprint(tensor)
    kept_shape, kept_sample = kept
    if now is None or now[0] != kept_shape:
        return {"other"}
    sample = now[1].to(kept_sample.dtype)  # A later hook may have cast the output.
    if torch.equal(sample.nan_to_num(7.0), kept_sample.nan_to_num(7.0)):
        if bool(sample.isfinite().any()):
            return {"equal"}
        return set()
    if torch.allclose(sample, kept_sample, rtol=1e-3, atol=1e-5, equal_nan=True):
        return {"near"}
    return {"other"}


def _run_backward(
    replayed: Replayed,
    outputs: Mapping[Path, Tensor],
    named: Mapping[str, Tensor],
    provenance: Provenance,
) -> None:
    """Run the backward pass from the kept gradients of the outputs to parameters and inputs."""
    grads = {}
    inner: set[Any] = set()
    for path, grad in replayed.call.grads.items():
        if path in outputs and outputs[path].grad_fn is not None:
            grads[path] = grad
            made_by: Any = outputs[path].grad_fn
            below = [node for node, _ in made_by.next_functions if node is not None]
            inner.update(BackwardGraph(below).nodes())
    # The gradient of an output that another output was made of contains the gradient through it.
    driven = {path: grad for path, grad in grads.items() if outputs[path].grad_fn not in inner}
    leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    if not driven or not leaves:
        return
    for path, grad in driven.items():
        source = provenance.seed("output gradient", spelled(path).lstrip("."), grad)
        if source is not None:
            replayed.returned.add(path)
    roots = [outputs[path] for path in driven]
    with provenance:
        # The outputs may be of a wider format.
        grads_of_roots = [grad.to(outputs[path].dtype) for path, grad in driven.items()]
        # No watch sees this pass, and only the copies get gradients. A reentrant checkpoint refuses that.
        torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001 # what `backward` calls
            tuple(roots),
            tuple(grads_of_roots),
            False,
            False,
            tuple(leaves.values()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    for name, leaf in leaves.items():
        if leaf.grad is None:
            continue
        source = provenance.source_of(leaf.grad)
        if source is not None:
            replayed.gradients[name] = source


def _enter(stack: ExitStack, call: KeptCall, module: nn.Module) -> None:
    """Enter the modes that a call ran in, and those that a replay needs."""
    for name, inner in module.named_modules():
        inner.training = call.training.get(name, inner.training)
    for kind, (enabled, dtype) in call.autocast.items():
        stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
    stack.enter_context(torch.enable_grad())
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        # The replay would raise in the mode of the script.
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
    else:
        noted_lines.enter(stack)
        stack.callback(noted_lines.leave, stack)
    if "torch._dynamo" in sys.modules:
        # Without it nothing is compiled, and importing the compiler takes seconds.
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def with_samples(
    call: KeptCall, order: list[int], only: Tensor | None = None, size: int | None = None
) -> KeptCall:
    """Return a call with samples in another order, in all inputs with as many or in one of them.

    With ``size``, the number of samples, the order may leave some out. The output gradients have the same order.
    """
    size = size or len(order)

    def exchanged(tensor: Tensor) -> Tensor:
        dims = [dim for dim, length in enumerate(tensor.shape[:2]) if length == size]
        if not dims or (only is not None and only is not tensor):
            return tensor
        return tensor.movedim(dims[0], 0)[order].movedim(0, dims[0])

    args, kwargs, grads = Copied((call.args, call.kwargs, call.grads), exchanged).value
    return replace(call, args=args, kwargs=kwargs, grads=grads)
