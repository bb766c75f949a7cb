"""Runs the calls of a failed step again, under probes, and leaves the run as it was."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradsurgeon.distributed.fully_shard import Cast, casts
from gradsurgeon.forensics import debugging
from gradsurgeon.forensics.kept_step import Fingerprint, KeptCall
from gradsurgeon.forensics.operations import nonfinite_kind
from gradsurgeon.forensics.provenance import ModuleCalls, Provenance
from gradsurgeon.forensics.sources import Source, is_intended
from gradsurgeon.forensics.undisturbed import exchanged, grads_kept, undisturbed
from gradsurgeon.planning import ROOT, named_modules, slots
from gradsurgeon.tensors.structure import Copied, Path, parameters_of, tensors_in

# How inputs are called among what has gradients.
INPUT = "input "
# Anomaly mode, hooks on all modules, random numbers: what a replay changes belongs to the whole process.
_one_at_a_time = threading.Lock()
# Each is called with the name of a tag and the tensor while a call is replayed, if rules act on tags.
shown_to: list[Callable[[str, Tensor], None]] = []


class _Thread(threading.local):
    replays = False


_this_thread = _Thread()


@dataclass(slots=True)
class Replayed:
    """What running one call again has shown.

    Attributes:
        call: which one.
        sources: what made the gradients of parameters non-finite, by name of the parameter.
        outputs: the same of what came out of the call, by path, and whether it is NaN or Inf.
        modules: the same of what came out of each module, by its name; of the first call of it.
        differs: the outputs whose sample is not that of the original call, by path, with whether it is close.
        is_compared: whether something finite came out of both, and is equal.
        moved: the buffers before and after the replay, by name.
        left: what the replay has changed and could not be put back.
        error: what the replay raised.
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
        call: which one.
        stop_at: the moment of the birth at which to stand in `pdb`.
    """
    module = call.module()
    found = Replayed(call)
    if module is None or call.iterators:
        return found
    if _this_thread.replays:
        found.error = RuntimeError("a replay inside of a replay")
        return found
    try:
        _this_thread.replays = True
        with (
            _one_at_a_time,
            undisturbed(module, call) as found.left,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            _run(module, call, found, stop_at)
    except Exception as error:  # noqa: BLE001 # whatever the code of the script raises: the decision of the trap stands
        found.error = error
    finally:
        _this_thread.replays = False
    return found


def _run(module: nn.Module, call: KeptCall, found: Replayed, stop_at: int) -> None:
    params = {
        name: call.weights.get(name, param)
        .detach()
        .requires_grad_(call.weights.get(name, param).requires_grad)
        for name, param in module.named_parameters(remove_duplicate=True)
    }
    buffers = {
        name: call.weights.get(name, buffer).detach().clone()
        for name, buffer in module.named_buffers()
    }
    for name, inner in module.named_modules():
        inner.training = call.training.get(name, inner.training)
    buffers.update({name: copy.clone() for name, copy in call.buffers.items()})
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    modules = ModuleCalls()
    provenance = Provenance(modules, stop_at)
    for name, param in params.items():
        provenance.seed("weight", name, param)
    for name, buffer in buffers.items():
        provenance.seed("buffer", name, buffer)
    args, kwargs = _copied((call.args, call.kwargs))
    inputs = dict(tensors_in([args, kwargs]))
    provenance.memory.made((*buffers.values(), *inputs.values()))
    for path, tensor in inputs.items():
        provenance.seed("input", spelled_input(call, path), tensor)
    canonical = {id(slot.owner._parameters[slot.key]): slot.name for slot in slots(module)}  # noqa: SLF001 # where modules keep them
    prefix = "" if call.name == ROOT else f"{call.name}."
    names = {
        name: prefix + canonical.get(id(param), name) for name, param in module.named_parameters()
    }
    leaves = {names[name]: param for name, param in params.items()}
    leaves |= {f"{INPUT}{spelled_input(call, path)}": tensor for path, tensor in inputs.items()}

    def came_out(name: str, output: Any) -> None:
        for _, tensor in tensors_in(output):
            source = provenance.source_of(tensor)
            if source is not None and not is_intended(source):
                found.modules.setdefault(name, source)

    with ExitStack() as stack:
        stack.enter_context(_module_calls(module, modules, came_out))
        # A model that is still divided does so by itself.
        stack.enter_context(_cast(module, {} if casts(module) else call.casts))
        stack.enter_context(_autocast(call.autocast))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        if "torch._dynamo" in sys.modules:
            # Nothing is compiled otherwise, and importing the compiler takes seconds.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # In the backward pass, too: checkpoints run parts of the forward pass there.
        stack.enter_context(exchanged(module, params, buffers))
        shown_to.append(came_out)
        stack.callback(shown_to.remove, came_out)
        stack.callback(provenance.memory.restore)
        stack.callback(debugging.leave)
        with provenance:
            output = module(*args, **kwargs)
        _compare(call, dict(tensors_in(output)), provenance, found)
        _go_back(call, dict(tensors_in(output)), leaves, provenance, found)
        # Checkpoints move them in the backward pass once more, as they have done in the step.
        found.moved = {
            name: (before[name], buffer.detach())
            for name, buffer in module.named_buffers()
            if name in before
        }


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
            # A hook that came after ours may have cast what came out.
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
    """Run the backward pass from the gradients that have reached the outputs."""
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
    # Reentrant checkpoints refuse to be told which leaves are wanted, and so reach any.
    reaches_any = _has_reentrant_checkpoint(driven, outputs)
    with grads_kept(leaves.values()) if reaches_any else nullcontext(), provenance:
        # Past the watch over backward passes, and into the copies alone.
        torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001 # what `backward` calls
            tuple(outputs[path] for path in driven),
            tuple(driven.values()),
            False,
            False,
            () if reaches_any else tuple(leaves.values()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    for name, leaf in leaves.items():
        if leaf.grad is not None and (source := provenance.source_of(leaf.grad)) is not None:
            found.sources[name] = source


def _outermost(grads: Mapping[Path, Tensor], outputs: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    """Leave out outputs that another one was made of: their gradient contains what comes through that one."""
    inner: set[Any] = set()
    for path in grads:
        inner |= _nodes_below(outputs[path])
    return {path: grad for path, grad in grads.items() if outputs[path].grad_fn not in inner}


def _has_reentrant_checkpoint(paths: Iterable[Path], outputs: Mapping[Path, Tensor]) -> bool:
    nodes = {outputs[path].grad_fn for path in paths}
    for path in paths:
        nodes |= _nodes_below(outputs[path])
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)


def _nodes_below(tensor: Tensor) -> set[Any]:
    """Return the nodes of the graph that a tensor was made through, without its own."""
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
    """Do around modules what `fully_shard` did, in a model that it does not divide."""
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


@contextmanager
def _autocast(states: Mapping[str, tuple[bool, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, (enabled, dtype) in states.items():
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        yield


def _copied(value: Any) -> Any:
    """Return arguments without the graph of the script, which a forward pass may write to and use up."""
    return Copied(
        value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    ).value


def _spelled(path: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def spelled_input(call: KeptCall, path: Sequence[int | str]) -> str:
    """Return how a script calls a tensor among the arguments: ``x``, or ``batch.image[0]``."""
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
