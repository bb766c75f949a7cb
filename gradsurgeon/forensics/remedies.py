"""Runs a blamed call again under the remedies that fit its diagnosis, and tells which of them help."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import numbered
from gradsurgeon.common.tried import Tried
from gradsurgeon.errors import reason_of
from gradsurgeon.forensics.kept_step import FailedStep, KeptCall
from gradsurgeon.forensics.operations import is_real, lines_here, tensors_of
from gradsurgeon.forensics.replay import Replayed, WatchTags, replay, with_samples
from gradsurgeon.tensors.backward_graph import operation_of

_LONGEST = 120
# Positional and keyword arguments.
_Given = tuple[Any, Any]
# Returns other arguments for a call of a function, ``None`` if the call is another one.
_Change = Callable[[str, _Given], _Given | None]
# Maps code in the advice to what it does to the operand.
_GUARDS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "(x + eps)": lambda x, eps: x + eps,
    "clamp(min=eps)": lambda x, eps: x.clamp(min=eps),
    "clamp(min=0)": lambda x, _: x.clamp(min=0),
    "clamp(max=10)": lambda x, _: x.clamp(max=10),
    "clamp(-1 + eps, 1 - eps)": lambda x, eps: x.clamp(-1 + eps, 1 - eps),
    "clamp(min=-1 + eps)": lambda x, eps: x.clamp(min=-1 + eps),
    "clamp(min=1 + eps)": lambda x, eps: x.clamp(min=1 + eps),
    "eps * torch.eye(n)": lambda x, eps: x + eps * torch.eye(x.shape[-1]).to(x),
}


def try_remedies(
    diagnosis: Diagnosis, call: KeptCall, failed: FailedStep, watch_tags: WatchTags
) -> Iterator[Tried]:
    """Run a call again under each remedy that fits, at most three; each as `replay` does, which puts everything back."""
    if diagnosis.rows is not None and diagnosis.rows.input_rows:
        rows = diagnosis.rows.input_rows
        size = len(call.first_input)
        others = sorted(set(range(size)).difference(rows))
        replayed = replay(with_samples(call, others, size=size), watch_tags)
        yield _judged(f"without {numbered('row', rows)} of the input", replayed, failed)
    why = diagnosis.cause
    if why is None or diagnosis.output is None:
        return
    dtype = getattr(torch, diagnosis.output.dtype)
    remedies = [_guard(diagnosis, code, dtype) for code in _GUARDS if code in why.advice][:1]
    if why.wider:
        remedies.append(_wider_format(diagnosis, dtype, why.wider.rpartition(" ")[2]))
    for text, change in remedies:
        changed = _Changed(change)
        replayed = replay(call, watch_tags, changed=changed)
        if changed.has_acted:
            yield _judged(text, replayed, failed)


def _judged(remedy: str, replayed: Replayed, failed: FailedStep) -> Tried:
    error = replayed.error
    if error is not None:
        why = reason_of(error)[:_LONGEST]
        return Tried(remedy, problem=f"the call raises {type(error).__name__}: {why}")
    gradients = None
    if replayed.call.grads and not replayed.returned:
        gradients = all(source.intended for source in replayed.gradients.values())
    outputs = all(kind != "NaN" and source.intended for kind, source in replayed.outputs.values())
    loss = None
    kept = failed.kept.losses.get(replayed.call.number)
    # No operation comes after a model that returns the loss.
    if kept is not None and not kept.nodes and len(replayed.numbers) == 1:
        loss = float(replayed.numbers[0])
    return Tried(remedy, outputs, gradients, loss)


class _Changed(TorchFunctionMode):
    """Changes the arguments of calls of torch that a remedy is for."""

    def __init__(self, change: _Change) -> None:
        super().__init__()
        self.has_acted = False
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = (args, kwargs or {})
        # A call that writes must write into the tensor of the script.
        if not name.startswith("__set") and (name[-1:] != "_" or name[:1] == "_"):
            changed = self._change(name.strip("_"), given)
            if changed is not None:
                self.has_acted = True
                given = changed
        return func(*given[0], **given[1])


def _is_there(diagnosis: Diagnosis) -> bool:
    return lines_here()[-1:] == diagnosis.lines[-1:]


def _guard(diagnosis: Diagnosis, code: str, dtype: torch.dtype) -> tuple[str, _Change]:
    """Guard the operation of a diagnosis: the divisor, else its first operand."""
    stem = diagnosis.operation.rpartition(".")[2].strip("_")
    if diagnosis.where == "backward":
        stem = operation_of(diagnosis.node)
    place = int(stem == "div")
    limits = torch.finfo(dtype)
    eps = max(1e-8, limits.smallest_normal)
    if "1" in code or "eye" in code:
        # In a sum with 1 it must not be lost.
        eps = max(1e-8, 10 * limits.eps)

    def change(name: str, given: _Given) -> _Given | None:
        args = [*given[0]]
        is_it = name in stem or stem in name.replace("rdiv", "reciprocal")
        operands = tensors_of(args[place : place + 1])
        if not is_it or not any(map(is_real, operands)) or not _is_there(diagnosis):
            return None
        args[place] = _GUARDS[code](args[place], eps)
        return args, given[1]

    return f"with `{code}`".replace("eps", f"{eps:.0e}"), change


def _wider_format(diagnosis: Diagnosis, narrow: torch.dtype, name: str) -> tuple[str, _Change]:
    """Run the operations of a line in a wider format, and what follows them on their results."""
    wide = getattr(torch, name)

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == narrow:
            return value.to(wide)
        return value

    def change(_: str, given: _Given) -> _Given | None:
        dtypes = {tensor.dtype for tensor in tensors_of(given)}
        if not dtypes >= {narrow, wide} and not _is_there(diagnosis):
            return None
        both: _Given = tree_map(widened, given)
        return both

    return f"in {name} from there on", change
