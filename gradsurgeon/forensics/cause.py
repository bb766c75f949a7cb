"""Why an operation returned non-finite numbers: it is repeated alone, in several ways, on the same inputs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradsurgeon import _dist
from gradsurgeon.diagnosis import Cause, Fault
from gradsurgeon.forensics.operations import (
    Call,
    elements,
    facts,
    is_real,
    nonfinite_kind,
    tensors_of,
)

# An error of the machine need not happen each time.
_REPEATS = 3
# Only larger numbers are a sign of an overflow of float64.
_HUGE = 1e150
_LESSER = (torch.float16, torch.bfloat16, torch.float32)
# Numbers that grew less are no sign of an overflow: a sum of their squares may still fit.
_GROWN = 1e3

# The remedies by operation: each table has regular expressions, in lower case, without underscores.
_SINGULAR = (
    r"(linalg)?(inv|inverse|solve|cholesky|choleskysolve|invex|det|slogdet|logdet|pinv|lu).*"
)
_ATTENTION = r"(scaleddotproduct|efficientattention|flashattention).*"
_PRODUCT = r"addmm|mm|bmm|baddbmm|matmul|linear|convolution|addbmm|dot|mv|addmv"
_SUM = r"sum|cumsum|mean|norm|linalgvectornorm|var.*|std.*|native(layer|batch|group)norm|.*rmsnorm"
_ROW = "leave one element of each row unmasked, or leave such rows out before it, not after it"

_FORWARD = {
    r"sqrt": "the root of a negative number is NaN: clamp the input with `clamp(min=0)`",
    r"rsqrt": "1 / sqrt(x) is infinite at 0 and NaN below: write `(x + eps).rsqrt()`",
    r"log|log2|log10": "0 or less has no logarithm: use `log_softmax`, `xlogy` or `clamp(min=eps)`",
    r"div|truedivide|reciprocal": "a division by 0: `clamp(min=eps)` the divisor",
    r"pow|float_?power": "a negative base with a fractional exponent is NaN: clamp the base",
    r"acos|asin": "the input is beyond -1 or 1, which rounding reaches: clamp with `clamp(-1 + eps, 1 - eps)`",
    r"(linalgvector|linalgmatrix)?norm": "the norm is not finite: look at its input",
    r"(std|var)(mean|correction)?": "one element has no spread: pass `correction=0`",
    r"mean|nanmean|median": "the mean of nothing is 0 / 0: divide by `max(count, 1)`",
    r"(log)?softmax(backwarddata)?": f"a row is masked completely (-Inf in each element): {_ROW}",
    r"logsumexp|logcumsumexp|logaddexp2?": f"every summand is minus infinity: {_ROW}",
    _ATTENTION: "a query may attend to nothing: let it attend to one position",
    r"nllloss.*|crossentropyloss.*": "no target counts, so the mean is 0 / 0: skip the batch",
    r"binarycrossentropy": "use `binary_cross_entropy_with_logits` of the logits",
    r"ctcloss.*|cudnnctcloss.*": "a target is longer than its input can spell: pass `zero_infinity=True`",
    _SINGULAR: "the matrix is singular: add `eps * torch.eye(n)` to it",
    r"mul|addcmul": "0 times an infinity is NaN: use `where` instead of multiplying by a mask",
    r"add|sub|rsub|sum|cumsum|addmm|mm|bmm|baddbmm|matmul": "infinities of both signs met: mask later",
}
_BACKWARD = {
    r"sqrt": "the derivative at 0 is infinite: write `(x + eps).sqrt()`",
    r"rsqrt": "the derivative at 0 is infinite: write `(x + eps).rsqrt()`",
    r"log|log2|log10": "the derivative at 0 is infinite: use `log_softmax` or `clamp(min=eps)`",
    r"div|truedivide|reciprocal": "the gradient of a division by 0: choose with `where` before the division",
    r"pow|float_?power": "the derivative at 0 is infinite: clamp the base with `clamp(min=eps)`",
    r"acos|asin": "the derivative at -1 and 1 is infinite: clamp with `clamp(-1 + eps, 1 - eps)`",
    r"(linalgvector|linalgmatrix)?norm": "the derivative at zeros is NaN: write `(x.square().sum(-1) + eps).sqrt()`",
    r"(cdist|pdist)(forward|backward)?": "the derivative of a distance of 0 is NaN: leave out such pairs",
    r"(std|var)(mean|correction)?": "the derivative of no spread is NaN: use `(x.var(...) + eps).sqrt()`",
    r"(log)?softmax(backwarddata)?": f"a row of the softmax is masked completely: {_ROW}",
    r"logsumexp|logcumsumexp|logaddexp2?": f"every summand was minus infinity: {_ROW}",
    r"mul|addcmul": "0 times an infinity is NaN: choose with `where` before the operation",
}
_OVERFLOW = {
    r"exp|exp2|expm1|sinh|cosh|specialexp.*": "subtract the maximum before the exponential, or clamp the input",
    r"pow|square|mul|addcmul|cumprod|prod": "compute it in float32 or wider, or scale the input down before it",
    r"div|truedivide|reciprocal|rsqrt": "the divisor is too small: add a larger epsilon",
    _PRODUCT: "look at the weights and the input (learning rate, initialization), or run it in bfloat16",
    rf"{_ATTENTION}|(log)?softmax": "queries and keys have grown: normalize them, or use bfloat16",
    _SUM: "the sum, or the squares in it, are too large: run it in float32",
}
_ADVICE = {
    "overflow": "the values are too large for the format: find out why they grow, or run this in float32",
    "mathematics": "the operation has no finite result for these numbers in any format: guard its inputs",
    "bad input": "no operation of the model has made these numbers: look at the data, the checkpoint, the update before",
    "underflow": "choose a constant that the format holds (1e-4 in float16), or run the operation in float32",
    "kernel": "another implementation gives finite numbers: use that one, and report the inputs",
    "transient": "the operation is finite when it is repeated: suspect the hardware or a race",
    "unknown": "the operation cannot be repeated in another format: look at its inputs",
}


def cause(fault: Fault, *evidence: str) -> Cause:
    return Cause(fault, evidence, _ADVICE[fault])


def cause_of_call(
    call: Call,
    number: int,
    node: str = "",
    *,
    history: Sequence[tuple[str, float]] = (),
    lost: str = "",
) -> Cause:
    """Repeat an operation on its inputs, and return why its result with a number is non-finite. Waits for the device.

    The script may write over the inputs later, so this is called right after the operation. ``lost`` is the sentence
    on a constant among the inputs that the format rounded to zero.
    """
    devices = {tensor.device for tensor in call.tensors if tensor.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind),
        ):
            found = _judged(call, number)
    except Exception as error:  # noqa: BLE001 # any operation may raise anything
        found = cause("unknown", f"repeating the operation raised {type(error).__name__}: {error}")
    if found.fault == "mathematics" and lost:
        return cause("underflow", *found.evidence, lost)
    if found.fault == "overflow" and (grown := _growth(history)):
        found = replace(found, evidence=(*found.evidence, grown))
    return replace(found, advice=_remedy(found.fault, call.name, node) or found.advice)


def _judged(call: Call, number: int) -> Cause:
    results = [_result(call, number) for _ in range(_REPEATS)]
    finite = [nonfinite_kind(result) for result in results].count("")
    if finite:
        text = f"repeated on the same numbers, the result is finite {finite} of {_REPEATS} times"
        return cause("transient", text)
    wide, beside, smaller = (
        _attempt(call, number, dtype=torch.float64, factor=f) for f in (1.0, 1 - 1e-6, 1e-3)
    )
    if wide is None:
        return cause("unknown", "the operation is not there in float64")
    if kind := nonfinite_kind(wide):
        text = f"in float64 the result is {facts(wide).kind} as well"
        # Smaller numbers do not leave a pole at zero. Beside any other pole the result is moderate.
        pole = _is_finite(beside) and _largest(beside) < _HUGE
        if kind == "Inf" and not pole and _is_finite(smaller):
            return cause("overflow", f"{text}, and finite for numbers a thousand times smaller")
        return cause("mathematics", text)
    return _of_format(call, number, results[0].dtype, _largest(wide))


def _of_format(call: Call, number: int, dtype: torch.dtype, largest: float) -> Cause:
    limit, name = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    told = f"in float64 the result is finite, up to {largest:.4g}"
    if largest > limit:
        return cause("overflow", f"{told}; {name} holds numbers up to {limit:.4g}")
    fits = f"{name} (up to {limit:.4g})"
    within = f"{told}: inside the operation a number was too large for {fits}"
    if large := _too_large_inside(call, number, limit):
        return cause("overflow", within, large)
    other = _by_another_kernel(call, number)
    if _is_finite(other):
        another = (
            f"another implementation in {name} gives finite numbers, up to {_largest(other):.4g}"
        )
        return cause("kernel", f"{told}, which fits into {fits}", another)
    if dtype == torch.float64:
        return cause("unknown", "there is no wider format to repeat it in")
    return cause("overflow", within)


def _too_large_inside(call: Call, number: int, limit: float) -> str:
    """Return a sentence on inputs whose squares are too large for a format, if smaller ones are fine."""
    given = [elements(t) for t in call.tensors if is_real(t) and t.numel()]
    largest = max(map(_largest, given), default=0.0)
    squares = largest * largest * max((max(t.shape, default=1) for t in given), default=1)
    if not squares > limit or not _is_finite(_attempt(call, number, factor=1 / largest)):
        return ""
    return f"the inputs reach {largest:.4g}, and a sum of their squares can reach {squares:.4g}"


def _by_another_kernel(call: Call, number: int) -> Tensor | None:
    from torch._decomp import decomposition_table  # noqa: PLC0415 # takes a while, and only here

    other = None
    if (written := decomposition_table.get(call.func)) is not None:
        other = _attempt(call, number, func=written)
    if other is None and any(tensor.device.type != "cpu" for tensor in call.tensors):
        other = _attempt(call, number, device=torch.device("cpu"))
    return other


def _attempt(call: Call, number: int, **options: Any) -> Tensor | None:
    try:
        result = _result(call, number, **options)
    except Exception:  # noqa: BLE001 # it does not accept these arguments
        return None
    return result if options.get("dtype") in (None, result.dtype) and is_real(result) else None


def _result(
    call: Call,
    number: int,
    *,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
    func: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Repeat an operation on copies of its arguments, scaled by a factor, or in another way."""

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor):
            part = _dist.local(value.detach())
            part = part.to(device, dtype if part.dtype in _LESSER else None, copy=True)
            return part.mul_(factor) if factor != 1.0 and is_real(part) else part
        if isinstance(value, torch.device):
            return device or value
        # Some operations take the dtype of the result as an argument.
        return dtype or value if isinstance(value, torch.dtype) and value in _LESSER else value

    args, kwargs = tree_map(fresh, (call.args, call.kwargs))
    return tensors_of((func or call.func)(*args, **kwargs))[number]


def _is_finite(result: Tensor | None) -> TypeGuard[Tensor]:
    return result is not None and not nonfinite_kind(result)


def _largest(tensor: Tensor) -> float:
    return float(elements(tensor).abs().max())


def _growth(history: Sequence[tuple[str, float]]) -> str:
    known = [(label, value) for label, value in history if value > 0]
    if not known:
        return ""
    (first, low), (last, high) = min(known, key=lambda one: one[1]), known[-1]
    if high < _GROWN * max(low, 1.0):
        return ""
    return (
        f"the largest magnitude grew from {low:.3g} ({first}) to {high:.3g} ({last}) right before"
    )


def _remedy(fault: Fault, operation: str, node: str) -> str:
    name = operation.rpartition(".")[2]
    if fault == "mathematics":
        made_by = re.fullmatch(r"(?P<name>\w+?)Backward\d*", node)
        maker = made_by["name"] if made_by else ""
        return _of(maker, _BACKWARD) or _of(maker, _FORWARD) or _of(name, _FORWARD)
    return _of(name, _OVERFLOW) if fault == "overflow" else ""


def _of(name: str, table: Mapping[str, str]) -> str:
    key = name.replace("_", "").lower()
    return next((told for names, told in table.items() if re.fullmatch(names, key)), "")
