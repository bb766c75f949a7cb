"""Why an operation returned non-finite numbers: it is repeated alone, in several ways, on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradsurgeon import _dist
from gradsurgeon.diagnosis import ALREADY, Cause, Fault
from gradsurgeon.forensics.operations import elements, facts, is_real, nonfinite_kind, tensors_of
from gradsurgeon.forensics.remedies import remedy
from gradsurgeon.forensics.sources import Birth, Call, Source

# An error of the machine need not happen each time.
_REPEATS = 3
# Only larger numbers are a sign of an overflow of float64.
_HUGE = 1e150
_LESSER = (torch.float16, torch.bfloat16, torch.float32)

_ADVICE = {
    "overflow": "the values are too large for the format: find out why they grow (the magnitudes before it), run this "
    "operation in float32 or wider, or bound its inputs",
    "mathematics": "the operation has no finite result for these numbers in any format: guard its inputs (an epsilon, "
    "a clamp, a mask applied before the operation, not after it)",
    "bad input": "find out where these numbers come from: no operation of the model has made them",
    "underflow": "choose a constant that the format holds (1e-4 in float16), or run the operation in float32",
    "kernel": "another implementation of the same operation gives finite numbers: use that one, try another "
    "version of torch, and report the inputs to its maintainers",
    "transient": "the same operation on the same numbers is finite when it is repeated: suspect the hardware or a "
    "race, and run a memory test of the machine before you trust its results",
    "unknown": "the operation cannot be repeated in another format: look at its inputs",
}
_LOOK_AT_LOSS = (
    "compute the loss inside the forward pass of a module that holds the model, and the next diagnosis names the "
    "operation; until then look at the divisions, roots, powers and logarithms among its operations"
)
_UPDATED = (
    "no trap stopped the update before, so its gradients were finite: the optimizer itself wrote this number there, or "
    "the script did since (a checkpoint, a copy)"
)
# Numbers that grew less are no sign of an overflow: a sum of their squares may still fit.
_GROWN = 1e3


def cause_of(source: Source, step: int = 0) -> Cause:
    """Return the cause for a source of non-finite numbers.

    Args:
        source: the operation, or the tensor that was non-finite before.
        step: how many updates came before.
    """
    if isinstance(source, Birth):
        return source.cause
    where = {
        "output gradient": "the gradient that came back to the model was non-finite already",
        "literal": "the script itself wrote the number",
        "loss input": f"{source.name} was not finite when the loss was computed",
        "unknown": "no operation that PyTorch shows made it: something else wrote into its memory",
    }
    text = where.get(
        source.what,
        f"{source.what} {source.name} was not finite {ALREADY.get(source.what, '')}",
    )
    if source.what == "output gradient":
        return Cause("unknown", (text,), _LOOK_AT_LOSS)
    if source.what == "weight" and step and not source.intended:
        return cause("bad input", text, _UPDATED)
    return cause("unknown" if source.what == "unknown" else "bad input", text)


def cause(fault: Fault, *evidence: str) -> Cause:
    """Return a cause with the general advice for its kind of fault."""
    return Cause(fault, evidence, _ADVICE[fault])


def cause_of_call(
    call: Call,
    number: int,
    node: str = "",
    *,
    history: Sequence[tuple[str, float]] = (),
    lost: str = "",
) -> Cause:
    """Repeat an operation on its inputs, and return why its result is non-finite. Waits for the device.

    The script may write over the inputs later, so this is called right after the operation.

    Args:
        call: the operation.
        number: which of its results.
        node: the node of the graph, in the backward pass.
        history: the largest magnitudes of the operations before.
        lost: the sentence on a constant among the inputs that the format rounded to zero.
    """
    with torch.no_grad():
        try:
            found = _repeat(call, number)
        except Exception as error:  # noqa: BLE001 # any operation may raise anything
            text = f"repeating the operation raised {type(error).__name__}: {error}"
            found = cause("unknown", text)
    if found.fault == "mathematics" and lost:
        return cause("underflow", *found.evidence, lost)
    if found.fault == "overflow" and (grown := _growth(history)):
        found = replace(found, evidence=(*found.evidence, grown))
    advice = remedy(found.fault, call.name, node)
    return replace(found, advice=advice) if advice else found


def _growth(history: Sequence[tuple[str, float]]) -> str:
    """Return a sentence on how the numbers grew over the operations before, if they did."""
    known = [(label, value) for label, value in history if value > 0]
    if not known:
        return ""
    (first, low), (last, high) = min(known, key=lambda one: one[1]), known[-1]
    if high < _GROWN * low or high < _GROWN:
        return ""
    return (
        f"the largest magnitude grew from {low:.3g} ({first}) to {high:.3g} ({last}) right before"
    )


def _on_host(call: Call) -> Call:
    def on_host(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return replace(call, args=tree_map(on_host, call.args), kwargs=tree_map(on_host, call.kwargs))


def _repeat(call: Call, number: int) -> Cause:
    devices = {t.device for t in tensors_of(call.args, call.kwargs) if t.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cpu"
    with (
        torch.random.fork_rng([d.index or 0 for d in devices], device_type=kind)
        if devices
        else torch.random.fork_rng([])
    ):
        first = _repeated(call, number)
        again = [
            nonfinite_kind(first),
            *(nonfinite_kind(_repeated(call, number)) for _ in range(_REPEATS - 1)),
        ]
        wide, beside, smaller = (
            _attempt(call, number, torch.float64, factor=f) for f in (1.0, 1 - 1e-6, 1e-3)
        )
    if not all(again):
        times = f"finite {again.count('')} of {_REPEATS} times"
        return cause("transient", f"repeated on the same numbers, the result is {times}")
    if wide is None:
        return cause("unknown", "the operation is not there in float64")
    if kind := nonfinite_kind(wide):
        text = f"in float64 the result is {facts(wide).kind} as well"
        # Smaller numbers do not leave a pole at zero. Right beside any other pole the result has a moderate size.
        pole = beside is not None and not nonfinite_kind(beside) and _largest(beside) < _HUGE
        if kind == "Inf" and not pole and smaller is not None and not nonfinite_kind(smaller):
            return cause("overflow", f"{text}, and finite for numbers a thousand times smaller")
        return cause("mathematics", text)
    return _of_format(call, number, first.dtype, _largest(wide))


def _of_format(call: Call, number: int, dtype: torch.dtype, largest: float) -> Cause:
    """Return the cause for an operation whose result is finite in float64."""
    limit, name = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    wide, fits = f"up to {largest:.4g}", f"up to {limit:.4g}"
    if largest > limit:
        text = f"in float64 the result is finite, {wide}; {name} holds numbers {fits}"
        return cause("overflow", text)
    within = f"in float64 the result is finite, {wide}: inside the operation a number was too large for {name} ({fits})"
    if large := _too_large_inside(call, number, limit):
        return cause("overflow", within, large)
    other = _by_another_kernel(call, number)
    if other is not None and not nonfinite_kind(other):
        return cause(
            "kernel",
            f"in float64 the result is finite, {wide}, which fits into {name} ({fits})",
            f"another implementation in {name} gives finite numbers, up to {_largest(other):.4g}",
        )
    if dtype == torch.float64:
        return cause("unknown", "there is no wider format to repeat it in")
    return cause("overflow", within)


def _too_large_inside(call: Call, number: int, limit: float) -> str:
    """Return a sentence on inputs whose squares, or their sum, are too large for a format, if smaller inputs are fine."""
    given = [elements(t) for t in tensors_of(call.args, call.kwargs) if is_real(t) and t.numel()]
    largest = max((float(values.abs().max()) for values in given), default=0.0)
    terms = max((max(values.shape, default=1) for values in given), default=1)
    if not largest * largest * terms > limit:
        return ""
    smaller = _attempt(call, number, None, factor=1 / largest)
    if smaller is None or nonfinite_kind(smaller):
        return ""
    return f"the inputs reach {largest:.4g}, and a sum of their squares can reach {largest * largest * terms:.4g}"


def _largest(tensor: Tensor) -> float:
    return float(elements(tensor).abs().max())


def _repeated(call: Call, number: int) -> Tensor:
    args, kwargs = _fresh(call, None)
    outputs = tensors_of(call.func(*args, **kwargs))
    return outputs[number]


def _attempt(
    call: Call, number: int, dtype: torch.dtype | None, *, factor: float = 1.0
) -> Tensor | None:
    """Return the result in another dtype, for inputs scaled by a factor."""
    args, kwargs = _fresh(call, dtype)
    if factor != 1.0:
        for tensor in tensors_of(args, kwargs):
            if is_real(tensor):
                tensor.mul_(factor)
    try:
        outputs = tensors_of(call.func(*args, **kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return outputs[number] if dtype in (None, outputs[number].dtype) else None


def _fresh(call: Call, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return copies of the arguments of an operation, with floating-point tensors in a dtype."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            part = _dist.local(value.detach())
            wide = dtype is not None and part.dtype in _LESSER
            return part.to(dtype) if wide else part.clone()
        # Some operations take the dtype of the result as an argument.
        return (
            dtype
            if dtype is not None and value in _LESSER and isinstance(value, torch.dtype)
            else value
        )

    return tree_map(copied, call.args), tree_map(copied, call.kwargs)


def _by_another_kernel(call: Call, number: int) -> Tensor | None:
    """Return the result of another implementation in the same dtype, if there is one."""
    from torch._decomp import decomposition_table  # noqa: PLC0415 # takes a while, and only here

    written = decomposition_table.get(call.func)
    args, kwargs = _fresh(call, None)
    tensors = tensors_of(args, kwargs)
    if written is not None:
        try:
            outputs = tensors_of(written(*args, **kwargs))
        except Exception:  # noqa: BLE001 # it does not accept these arguments
            outputs = []
        if number < len(outputs) and is_real(outputs[number]):
            return outputs[number]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        moved = _on_host(call)
        try:
            result = call.func(*moved.args, **moved.kwargs)
        except Exception:  # noqa: BLE001 # the host has none
            return None
        return tensors_of(result)[number]
    return None
