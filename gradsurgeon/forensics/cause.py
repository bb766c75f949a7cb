"""Why an operation returned non-finite numbers: it is repeated alone, in several ways, on the same inputs."""

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradsurgeon.common.diagnosis import Cause, Fault
from gradsurgeon.forensics.operations import (
    Call,
    elements,
    ends,
    facts,
    is_real,
    nonfinite_kind,
    tensors_of,
)
from gradsurgeon.forensics.undisturbed import RandomState
from gradsurgeon.tensors import _dist

# An error of the machine need not happen each time.
_REPEATS = 3
# Only larger numbers are a sign of an overflow of float64.
_HUGE = 1e150

# The remedies by operation: each table has regular expressions, in lower case, without underscores.
_SINGULAR = (
    r"(linalg)?(inv|inverse|solve|cholesky|choleskysolve|invex|det|slogdet|logdet|pinv|lu).*"
)
_ATTENTION = r"(scaleddotproduct|efficientattention|flashattention).*"
_PRODUCT = r"addmm|mm|bmm|baddbmm|matmul|linear|convolution|addbmm|dot|mv|addmv"
_SUM = r"sum|cumsum|mean|norm|linalgvectornorm|var.*|std.*|native(layer|batch|group)norm|.*rmsnorm"
_IN_ANY_CASE = {
    r"ctcloss.*|cudnnctcloss.*": "a target is longer than its input can spell: pass `zero_infinity=True`",
    r"exp|exp2|expm1|sinh|cosh|specialexp.*": "subtract the maximum before the exponential, or `clamp(max=10)` the input",
}
_ROW = "leave one element of each row unmasked, or leave such rows out before it, not after it"

_FORWARD = {
    **_IN_ANY_CASE,
    r"sqrt": "the root of a negative number is NaN: clamp the input with `clamp(min=0)`",
    r"rsqrt": "1 / sqrt(x) is infinite at 0 and NaN below: write `(x + eps).rsqrt()`",
    r"log|log2|log10": "0 or less has no logarithm: use `log_softmax`, `xlogy` or `clamp(min=eps)`",
    r"div|truedivide|reciprocal": "a division by 0: `clamp(min=eps)` the divisor",
    r"pow|float_?power": "a negative base with a fractional exponent is NaN: `clamp(min=eps)` the base",
    r"acos|asin": "the input is beyond -1 or 1, which rounding reaches: clamp with `clamp(-1 + eps, 1 - eps)`",
    r"(linalgvector|linalgmatrix)?norm": "the norm is not finite: look at its input",
    r"(std|var)(mean|correction)?": "one element has no spread: pass `correction=0`",
    r"mean|nanmean|median": "the mean of nothing is 0 / 0: divide by `max(count, 1)`",
    r"(log)?softmax(backwarddata)?": f"a row is masked completely (-Inf in each element): {_ROW}",
    r"logsumexp|logcumsumexp|logaddexp2?": f"every summand is minus infinity: {_ROW}",
    _ATTENTION: "a query may attend to nothing: let it attend to one position",
    r"nllloss.*|crossentropyloss.*": "no target counts, so the mean is 0 / 0: skip the batch",
    r"binarycrossentropy": "use `binary_cross_entropy_with_logits` of the logits",
    r"logdet": "the determinant is not positive: use `torch.linalg.slogdet`, or add `eps * torch.eye(n)` to a singular matrix",
    _SINGULAR: "the matrix is singular: add `eps * torch.eye(n)` to it",
    r"mul|addcmul": "0 times an infinity is NaN: use `where` instead of multiplying by a mask",
    r"add|sub|rsub|sum|cumsum|addmm|mm|bmm|baddbmm|matmul": "infinities of both signs met: mask later",
}
_BACKWARD = {
    **_FORWARD,
    r"sqrt": "the derivative at 0 is infinite: write `(x + eps).sqrt()`",
    r"rsqrt": "the derivative at 0 is infinite: write `(x + eps).rsqrt()`",
    r"log1p": "the derivative at -1 is infinite: clamp with `clamp(min=-1 + eps)`",
    r"log|log2|log10": "the derivative at 0 is infinite: use `log_softmax` or `clamp(min=eps)`",
    r"div|truedivide|reciprocal": "the gradient of a division by 0: choose with `where` before the division",
    r"pow|float_?power": "the derivative at 0 is infinite: clamp the base with `clamp(min=eps)`",
    r"acos|asin": "the derivative at -1 and 1 is infinite: clamp with `clamp(-1 + eps, 1 - eps)`",
    r"atanh": "the derivative at -1 and 1 is infinite: clamp with `clamp(-1 + eps, 1 - eps)`",
    r"acosh": "the derivative at 1 is infinite: clamp with `clamp(min=1 + eps)`",
    r"(linalgvector|linalgmatrix)?norm": "the derivative at zeros is NaN: write `(x.square().sum(-1) + eps).sqrt()`",
    r"(cdist|pdist)(forward|backward)?": "the derivative of a distance of 0 is NaN: leave out such pairs",
    r"(std|var)(mean|correction)?": "the derivative of no spread is NaN: use `(x.var(...) + eps).sqrt()`",
    r"(log)?softmax(backwarddata)?": f"a row of the softmax is masked completely: {_ROW}",
    r"logsumexp|logcumsumexp|logaddexp2?": f"every summand was minus infinity: {_ROW}",
    r"mul|addcmul": "0 times an infinity is NaN: choose with `where` before the operation",
    r"linalg(eig|svd).*": "vectors of equal values have no derivative: make the values differ, or use no vectors",
}
_OVERFLOW = {
    **_IN_ANY_CASE,
    r"pow|square|mul|addcmul|cumprod|prod": "scale the input down before it",
    r"div|truedivide|reciprocal|rsqrt": "the divisor is too small: add a larger epsilon",
    _PRODUCT: "look at the weights and the input (learning rate, initialization)",
    rf"{_ATTENTION}|(log)?softmax": "queries and keys have grown: normalize them",
    _SUM: "the sum, or the squares in it, are too large: scale the input down",
}
_TABLES = {"overflow": [_OVERFLOW], "mathematics": [_BACKWARD, _FORWARD]}
_ADVICE = {
    "overflow": "the values are too large for the format: find out why they grow",
    "mathematics": "the operation has no finite result for these numbers in any format: guard its inputs",
    "bad input": "no operation of the model has made these numbers: look at the data, the checkpoint, the update before",
    "underflow": "choose a constant that the format holds, such as 1e-4, or run the operation in a wider format",
    "kernel": "another implementation gives finite numbers: use that one, and report the inputs",
    "transient": "the operation is finite when it is repeated: suspect the hardware or a race",
    "unknown": "the operation cannot be repeated in another format: look at its inputs",
}


def cause(fault: Fault, *evidence: str, advice: str = "") -> Cause:
    if not advice:
        advice = _ADVICE[fault]
    return Cause(fault, evidence, advice)


def cause_of_call(call: Call, index: int, node: str = "", *, lost: str = "") -> Cause:
    """Repeat an operation, and return why the result with an index is non-finite. Waits for the device.

    The script may write over the inputs later, so this is called right after the operation. ``node`` is the node that
    backward runs, if it runs one; ``lost`` the sentence on a constant among the inputs that the format rounded to zero.
    """
    devices = [str(tensor.device) for tensor in call.tensors]
    random_state = RandomState.now(devices)
    try:
        with torch.no_grad():
            judged = _cause_of_result(call, index)
    except Exception as error:  # noqa: BLE001 # any operation may raise anything
        judged = cause("unknown", f"repeating the operation raised {type(error).__name__}: {error}")
    finally:
        random_state.set()
    if judged.fault == "mathematics" and lost:
        is_half = max(tensor.itemsize for tensor in call.tensors) < torch.float32.itemsize
        wider = "float32" if is_half else "float64"
        return replace(cause("underflow", *judged.evidence, lost), wider=wider)
    advice = judged.advice
    # The remedies clamp, which complex numbers cannot.
    if not any(tensor.is_complex() for tensor in call.tensors):
        advice = remedy_for(judged.fault, call.name, node) or advice
    if judged.wider:
        advice += f", or run it in {judged.wider}"
    return replace(judged, advice=advice)


def _cause_of_result(call: Call, index: int) -> Cause:
    results = [_result(call, index) for _ in range(_REPEATS)]
    finite = len([result for result in results if not nonfinite_kind(result)])
    if finite:
        text = f"repeated on the same numbers, the result is finite {finite} of {_REPEATS} times"
        return cause("transient", text)
    wide = _result(call, index, least=torch.float64)
    if wide.dtype not in (torch.float64, torch.complex128):
        return cause("unknown", "the operation is not there in float64")
    kind = nonfinite_kind(wide)
    dtype = results[0].dtype
    if not kind:
        judged = _cause_of_format(call, index, dtype, wide)
    else:
        text = f"in {_name(wide.dtype)} the result is {facts(wide).kind} as well"
        if kind != "Inf" or not _overflows_double(call, index):
            return cause("mathematics", text)
        judged = cause("overflow", f"{text}, and finite for smaller numbers")
    if judged.fault == "overflow":
        return replace(judged, wider=_wider_format(call, index, dtype))
    return judged


def _overflows_double(call: Call, index: int) -> bool:
    """Tell an overflow from a pole. Smaller numbers do not leave a pole at zero; beside others the result is moderate."""
    beside = _result(call, index, least=torch.float64, factor=1 - 1e-6)
    if not nonfinite_kind(beside) and _largest(beside) < _HUGE:
        return False
    factor = 1e-3 / max(_largest_input(call), 1.0)
    return not nonfinite_kind(_result(call, index, least=torch.float64, factor=factor))


def _cause_of_format(call: Call, index: int, dtype: torch.dtype, wide: Tensor) -> Cause:
    limit = torch.finfo(dtype).max
    name = _name(dtype)
    largest = _largest(wide)
    text = f"in {_name(wide.dtype)} the result is finite, up to {largest:.4g}"
    if largest > limit:
        return cause("overflow", f"{text}; {name} holds numbers up to {limit:.4g}")
    fits = f"{name} (up to {limit:.4g})"
    most = _largest_input(call)
    longest = max([max(tensor.shape, default=1) for tensor in call.tensors], default=1)
    other = None
    # A sum of squares can be too large for the format.
    if most * most * longest <= limit:
        other = _by_another_kernel(call, index)
    if other is None or nonfinite_kind(other):
        inside = f"inside the operation a number was too large for {fits}"
        return cause("overflow", f"{text}: {inside}")
    another = f"another implementation in {name} gives finite numbers, up to {_largest(other):.4g}"
    return cause("kernel", f"{text}, which fits into {fits}", another)


def _wider_format(call: Call, index: int, dtype: torch.dtype) -> str:
    """Return the narrowest format in which the result is finite; empty if there is none."""
    for least in (torch.float32, torch.float64):
        wider = torch.promote_types(dtype, least)
        if wider == dtype or nonfinite_kind(_result(call, index, least=least)):
            continue
        # bfloat16 has the range of float32.
        if dtype == torch.float16 and wider == torch.float32:
            return "bfloat16 or float32"
        return _name(wider)
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _largest_input(call: Call) -> float:
    tensors = [tensor for tensor in call.tensors if is_real(tensor) and tensor.numel()]
    return max(map(_largest, tensors), default=0.0)


def _by_another_kernel(call: Call, index: int) -> Tensor | None:
    from torch._decomp import decomposition_table  # noqa: PLC0415 # takes a while, and only here

    # The other implementation may refuse the arguments.
    with suppress(Exception):
        if call.func in decomposition_table:
            return _result(replace(call, func=decomposition_table[call.func]), index)
        if any(tensor.device.type != "cpu" for tensor in call.tensors):
            return _result(call, index, device=torch.device("cpu"))
    return None


def _result(
    call: Call,
    index: int,
    *,
    least: torch.dtype | None = None,
    factor: float = 1.0,
    device: torch.device | None = None,
) -> Tensor:
    """Repeat an operation on copies of its arguments, in another format, scaled by a factor, or on another device."""
    # An operation on integers alone, such as a division, returns the default format.
    are_integers = not any(map(is_real, call.tensors))

    def converted(value: Any) -> Any:
        if isinstance(value, Tensor):
            part = _dist.local(value.detach())
            dtype = part.dtype
            if least is not None and (are_integers or is_real(part)):
                dtype = torch.promote_types(dtype, least)
            part = part.to(device, dtype, copy=True)
            if factor != 1.0 and is_real(part):
                part.mul_(factor)
            return part
        if isinstance(value, torch.device) and device is not None:
            return device
        # Some operations take the dtype of the result as an argument.
        if isinstance(value, torch.dtype) and value.is_floating_point and least is not None:
            return torch.promote_types(value, least)
        return value

    args, kwargs = tree_map(converted, (call.args, call.kwargs))
    return tensors_of(call.func(*args, **kwargs))[index]


def _largest(tensor: Tensor) -> float:
    return max(map(abs, ends(elements(tensor))))


def remedy_for(fault: Fault, operation: str, node: str = "") -> str:
    """Return the remedy for an operation, or for the operation whose derivative the node computes."""
    for table in _TABLES.get(fault, ()):
        name = node if table is _BACKWARD else operation
        stem = name.rpartition(".")[2].partition("Backward")[0]
        key = stem.replace("_", "").lower()
        for names, remedy in table.items():
            if re.fullmatch(names, key):
                return remedy
    return ""
