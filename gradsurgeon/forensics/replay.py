"""Runs the calls of a failed step again under probes, and leaves the training as it was."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradsurgeon.forensics.kept_step import Fingerprint, KeptCall, fingerprint
from gradsurgeon.forensics.operations import ModuleCalls, nonfinite_kind
from gradsurgeon.forensics.provenance import Provenance, Seed
from gradsurgeon.forensics.sources import NonfiniteSource
from gradsurgeon.forensics.undisturbed import exchanged, undisturbed
from gradsurgeon.language.planning import slots
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.structure import Copied, Path, parameters_of, tensors_in

INPUT = "input "
_FREED = "an argument of the call has no numbers any more, such as a parameter that fully_shard has freed"
# Anomaly mode, hooks on all modules and random numbers belong to the whole process.
_one_at_a_time = threading.RLock()
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
    """

    call: KeptCall
    gradients: dict[str, NonfiniteSource] = field(default_factory=dict)
    outputs: dict[Path, tuple[str, NonfiniteSource]] = field(default_factory=dict)
    modules: dict[str, NonfiniteSource] = field(default_factory=dict)
    returned: set[Path] = field(default_factory=set)
    compared: set[Literal["equal", "near", "other"]] = field(default_factory=set)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None


def replay(call: KeptCall, watch_tags: WatchTags, *, stop_at: int = 0) -> Replayed:
    """Run a call and its backward pass again; open `pdb` at the birth with the moment ``stop_at``."""
    module = call.module()
    found = Replayed(call)
    if module is None or call.iterators:
        return found
    try:
        with _one_at_a_time, undisturbed(module, call.random), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run(module, found, watch_tags, stop_at)
    except Exception as error:  # noqa: BLE001 # the code of the script may raise anything
        found.error = error
    return found


def _run(module: nn.Module, found: Replayed, watch_tags: WatchTags, stop_at: int) -> None:
    call = found.call
    modules = ModuleCalls()
    provenance = Provenance(modules, stop_at)
    own = {**dict(module.named_parameters()), **call.weights}
    params = {
        name: own[name].detach().requires_grad_(own[name].requires_grad)
        for name, _ in module.named_parameters()
    }
    then = {**dict(module.named_buffers()), **call.weights, **call.buffers}
    buffers = {name: then[name].detach().clone() for name, _ in module.named_buffers()}
    for name, inner in module.named_modules():
        inner.training = call.training.get(name, inner.training)
    args, kwargs = Copied((call.args, call.kwargs), _own_copy).value
    inputs = {input_name(module, path): tensor for path, tensor in tensors_in([args, kwargs])}
    provenance.memory.add_own((*buffers.values(), *inputs.values()))
    given: dict[Seed, dict[str, Tensor]] = {"weight": params, "buffer": buffers, "input": inputs}
    for what, named in given.items():
        for name, tensor in named.items():
            provenance.seed(what, name, tensor)

    def came_out(name: str, output: Any) -> None:
        for _, tensor in tensors_in(output):
            source = provenance.source_of(tensor)
            if source is not None and not source.intended:
                found.modules.setdefault(name, source)

    leaves = {f"{INPUT}{name}": tensor for name, tensor in inputs.items()}
    known = _canonical_names(module)
    leaves |= {
        call.prefix + known.get(id(param), name): params[name]
        for name, param in module.named_parameters()
    }
    with modules.watched(module, came_out), _as_then(call), ExitStack() as stack:
        # Checkpoints run parts of the forward pass in the backward pass.
        stack.enter_context(exchanged(module, {**params, **buffers}))
        stack.enter_context(watch_tags(came_out))
        stack.callback(provenance.memory.restore)
        with provenance:
            output = module(*args, **kwargs)
        outputs = dict(tensors_in(output))
        for path, kept in call.outputs.items():
            found.compared |= _compared(kept, outputs.get(path))
        for path, tensor in outputs.items():
            if (source := provenance.source_of(tensor)) is not None:
                found.outputs[path] = nonfinite_kind(tensor), source
        _go_back(found, outputs, leaves, provenance)
        # Checkpoints change buffers once more in the backward pass, as they did in the step.
        found.buffers = {name: buffer.detach() for name, buffer in module.named_buffers()}


def _canonical_names(module: nn.Module) -> dict[int, str]:
    """Return the names of rules by identity of the parameter; a tied parameter goes by its first name."""
    names: dict[int, str] = {}
    for slot in slots(module):
        names.setdefault(id(slot.owner._parameters[slot.key]), slot.name)  # noqa: SLF001 # where modules keep them
    return names


def _own_copy(tensor: Tensor) -> Tensor:
    """Return a copy of an argument without its graph, so the forward pass may write to it."""
    if _torch.is_freed(tensor):
        raise RuntimeError(_FREED)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _compared(kept: Fingerprint, tensor: Tensor | None) -> set[Literal["equal", "near", "other"]]:
    """Compare an output with the output of the call; return nothing if no finite number can be compared."""
    now = None if tensor is None else fingerprint(tensor)
    if now is None or now[0] != kept[0]:
        return {"other"}
    other = kept[1]
    sample = now[1].to(other.dtype)  # A later hook may have cast the output.
    if torch.equal(sample.nan_to_num(7.0), other.nan_to_num(7.0)):
        return {"equal"} if bool(sample.isfinite().any()) else set()
    near = torch.allclose(sample, other, rtol=1e-3, atol=1e-5, equal_nan=True)
    return {"near" if near else "other"}


def _go_back(
    found: Replayed,
    outputs: Mapping[Path, Tensor],
    named: Mapping[str, Tensor],
    provenance: Provenance,
) -> None:
    driven = {
        path: grad
        for path, grad in found.call.grads.items()
        if path in outputs and outputs[path].grad_fn is not None
    }
    # The gradient of an output that another output was made of contains the gradient through it.
    inner = set().union(*(_nodes_below(outputs[path].grad_fn) for path in driven))
    driven = {path: grad for path, grad in driven.items() if outputs[path].grad_fn not in inner}
    leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    if not (driven and leaves):
        return
    for path, grad in driven.items():
        if provenance.seed("output gradient", _spelled(path).lstrip("."), grad) is not None:
            found.returned.add(path)
    with provenance:
        # No watch sees this pass, and only the copies get gradients. A reentrant checkpoint refuses that.
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
            found.gradients[name] = source


def _nodes_below(start: Any) -> set[Any]:
    pending = [start]
    met = {None}
    while pending:
        new = {following for following, _ in pending.pop().next_functions} - met
        met |= new
        pending += new
    return met


@contextmanager
def _as_then(call: KeptCall) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, (enabled, dtype) in call.autocast.items():
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        if "torch._dynamo" in sys.modules:
            # Without it nothing is compiled, and importing the compiler takes seconds.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _spelled(path: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def input_name(module: nn.Module, path: Path) -> str:
    """Return the name of a tensor among the arguments: ``x``, or ``batch.image[0]``."""
    keyword, first, *rest = path
    if keyword == 0 and isinstance(first, int):
        named = parameters_of(module.forward)[first : first + 1]
        first = next((one.name for one in named if one.kind is not one.VAR_POSITIONAL), first)
    head = first if isinstance(first, str) else f"argument {first}"
    return f"{head}{_spelled(rest)}"
