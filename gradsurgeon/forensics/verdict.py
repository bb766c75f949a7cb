"""Why an operation made what is not finite out of finite tensors: it is repeated alone, in several ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradsurgeon import _dist
from gradsurgeon.diagnosis import ALREADY, Fault, Verdict
from gradsurgeon.forensics.operations import elements, is_real, nonfinite_kind, tensors_of
from gradsurgeon.forensics.sources import Birth, Call, Origin, Source

# A fault of a machine need not show in each repetition.
_REPEATS = 3
# Numbers below it are no sign of a result that is too large for float64.
_HUGE = 1e150
_LESSER = (torch.float16, torch.bfloat16, torch.float32)


_ADVICE = {
    "overflow": "the values are too large for the format: look at what let them grow (the numbers before the "
    "birth), run this operation in float32 or wider, or bound what goes in",
    "mathematics": "the operation has no finite result for these numbers in any format: guard what goes in (an "
    "epsilon, a clamp, a mask applied before the operation, not after it)",
    "bad input": "look at where these numbers come from: no operation of the model has made them",
    "kernel": "another implementation of the same operation gives finite numbers: use that one, try another "
    "version of torch, and report the inputs to its maintainers",
    "transient": "the same operation on the same numbers is finite when it is repeated: suspect the hardware "
    "or a race, and run the machine's memory test before you trust its results",
    "unknown": "the operation cannot be repeated in another format: look at what goes in",
}
_LOOK_AT_LOSS = (
    "compute the loss inside the forward pass of a module that holds the model, and the next diagnosis names the "
    "operation; until then look at the divisions, roots, powers and logarithms among its operations"
)


def judge(source: Source) -> Verdict:
    """Judge the source of what is not finite. Waits for its device."""
    if isinstance(source, Origin):
        where = {
            "output gradient": "the gradient that came back to the model was not finite already",
            "literal": "the script itself wrote the number",
            "loss input": f"{source.name} was not finite when the loss was computed",
            "unknown": "no operation that PyTorch shows made it: something wrote into memory past it",
        }
        text = where.get(
            source.what,
            f"{source.what} {source.name} was not finite {ALREADY.get(source.what, '')}",
        )
        if source.what == "output gradient":
            return Verdict("unknown", (text,), _LOOK_AT_LOSS)
        return _verdict("unknown" if source.what == "unknown" else "bad input", text)
    if source.call is None:
        return _verdict(
            "unknown", "what went into the operation was not kept, so that it cannot be repeated"
        )
    with torch.no_grad():
        try:
            return _of_call(source, source.call)
        except Exception as error:  # noqa: BLE001 # of any operation: the birth stands without a verdict
            return _verdict(
                "unknown", f"repeating the operation raised {type(error).__name__}: {error}"
            )


def _verdict(fault: Fault, *evidence: str) -> Verdict:
    return Verdict(fault, evidence, _ADVICE[fault])


def _of_call(birth: Birth, call: Call) -> Verdict:
    number, dtype = birth.output_number, birth.output.dtype
    state = torch.get_rng_state()
    try:
        again = [nonfinite_kind(_repeated(call, number)) for _ in range(_REPEATS)]
        wide, beside, smaller = (
            _attempt(call, number, torch.float64, factor=f) for f in (1.0, 1 - 1e-6, 1e-3)
        )
        other = _by_another_kernel(call, number)
    finally:
        torch.set_rng_state(state)
    if not all(again):
        times = f"finite {again.count('')} of {_REPEATS} times"
        return _verdict("transient", f"repeated on the same numbers, the result is {times}")
    if wide is None:
        return _verdict("unknown", "the operation is not there in float64")
    if kind := nonfinite_kind(wide):
        text = f"in float64 the result is {kind} as well"
        # A pole at zero stays where it is, however small the numbers are; right beside another one they are
        # of a moderate size.
        pole = beside is not None and not nonfinite_kind(beside) and _largest(beside) < _HUGE
        if kind == "Inf" and not pole and smaller is not None and not nonfinite_kind(smaller):
            return _verdict("overflow", f"{text}, and finite for numbers a thousand times smaller")
        return _verdict("mathematics", text)
    return _of_format(dtype, _largest(wide), other)


def _of_format(dtype: str, largest: float, other: Tensor | None) -> Verdict:
    """Judge an operation whose result is finite in float64."""
    limit = torch.finfo(getattr(torch, dtype)).max
    wide, fits = f"up to {largest:.4g}", f"up to {limit:.4g}"
    if largest > limit:
        text = f"in float64 the result is finite, {wide}; {dtype} holds numbers {fits}"
        return _verdict("overflow", text)
    if other is not None and not nonfinite_kind(other):
        return _verdict(
            "kernel",
            f"in float64 the result is finite, {wide}, which fits into {dtype} ({fits})",
            f"another implementation in {dtype} gives finite numbers, up to {_largest(other):.4g}",
        )
    if dtype == "float64":
        return _verdict("unknown", "there is no wider format to repeat it in")
    return _verdict(
        "overflow",
        f"in float64 the result is finite, {wide}: within the operation a number was too large for "
        f"{dtype} ({fits})",
    )


def _largest(tensor: Tensor) -> float:
    return float(elements(tensor).abs().max())


def _repeated(call: Call, number: int) -> Tensor:
    args, kwargs = _fresh(call, None)
    outputs = tensors_of(call.func(*args, **kwargs))
    return outputs[number]


def _attempt(call: Call, number: int, dtype: torch.dtype, *, factor: float = 1.0) -> Tensor | None:
    args, kwargs = _fresh(call, dtype)
    if factor != 1.0:
        for tensor in tensors_of(args, kwargs):
            if is_real(tensor):
                tensor.mul_(factor)
    try:
        outputs = tensors_of(call.func(*args, **kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return outputs[number] if outputs[number].dtype == dtype else None


def _fresh(call: Call, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return copies of what an operation was given, floating-point ones in a dtype."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            part = _dist.local(value.detach())
            wide = dtype is not None and part.dtype in _LESSER
            return part.to(dtype) if wide else part.clone()
        # The dtype of a result that is asked for by name.
        return (
            dtype
            if dtype is not None and value in _LESSER and isinstance(value, torch.dtype)
            else value
        )

    return tree_map(copied, call.args), tree_map(copied, call.kwargs)


def _by_another_kernel(call: Call, number: int) -> Tensor | None:
    """Return what the operation gives in the same dtype by another implementation, where there is one."""
    from torch._decomp import decomposition_table  # noqa: PLC0415 # takes a while, and only here

    written = decomposition_table.get(call.func)
    args, kwargs = _fresh(call, None)
    tensors = tensors_of(args, kwargs)
    if written is not None:
        try:
            outputs = tensors_of(written(*args, **kwargs))
        except Exception:  # noqa: BLE001 # it is not for these arguments
            outputs = []
        if number < len(outputs) and is_real(outputs[number]):
            return outputs[number]
    if any(tensor.device.type != "cpu" for tensor in tensors):

        def on_host(value: Any) -> Any:
            return value.cpu() if isinstance(value, Tensor) else value

        try:
            result = call.func(*tree_map(on_host, args), **tree_map(on_host, kwargs))
        except Exception:  # noqa: BLE001 # there is none for the host
            return None
        return tensors_of(result)[number]
    return None
