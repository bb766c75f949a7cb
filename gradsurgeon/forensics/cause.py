"""Why an operation returned non-finite numbers: it is repeated alone, in several ways, on the same inputs."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
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
_SAME: Mapping[torch.dtype, torch.dtype] = {}
# Only larger numbers are a sign of an overflow of float64.
_HUGE = 1e150
_IN_SINGLE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_IN_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
# An operation on integers alone, such as a division, returns the default format.
_INTEGERS_IN_DOUBLE = dict.fromkeys(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64
)

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
    r"pow|square|mul|addcmul|cumprod|prod": "scale the input down before it",
    r"div|truedivide|reciprocal|rsqrt": "the divisor is too small: add a larger epsilon",
    _PRODUCT: "look at the weights and the input (learning rate, initialization)",
    rf"{_ATTENTION}|(log)?softmax": "queries and keys have grown: normalize them",
    _SUM: "the sum, or the squares in it, are too large: scale the input down",
}
_ADVICE = {
    "overflow": "the values are too large for the format: find out why they grow",
    "mathematics": "the operation has no finite result for these numbers in any format: guard its inputs",
    "bad input": "no operation of the model has made these numbers: look at the data, the checkpoint, the update before",
    "underflow": "choose a constant that the format holds, such as 1e-4, or run the operation in a wider format",
    "kernel": "another implementation gives finite numbers: use that one, and report the inputs",
    "transient": "the operation is finite when it is repeated: suspect the hardware or a race",
    "unknown": "the operation cannot be repeated in another format: look at its inputs",
}


def cause(fault: Fault, *evidence: str) -> Cause:
    return Cause(fault, evidence, _ADVICE[fault])


def cause_of_call(call: Call, index: int, node: str = "", *, lost: str = "") -> Cause:
    """Repeat an operation, and return why the result with an index is non-finite. Waits for the device.

    The script may write over the inputs later, so this is called right after the operation. ``lost`` is the sentence
    on a constant among the inputs that the format rounded to zero.
    """
    wider = ""
    devices = [str(tensor.device) for tensor in call.tensors]
    random_state = RandomState.now(devices)
    try:
        with torch.no_grad():
            judged = _cause_of_result(call, index)
            if judged.fault == "overflow":
                wider = _wider_format(call, index)
    except Exception as error:  # noqa: BLE001 # any operation may raise anything
        judged = cause("unknown", f"repeating the operation raised {type(error).__name__}: {error}")
    finally:
        random_state.set()
    if judged.fault == "mathematics" and lost:
        return cause("underflow", *judged.evidence, lost)
    advice = judged.advice
    # The remedies clamp, which complex numbers cannot.
    if not any(tensor.is_complex() for tensor in call.tensors):
        remedy = _remedy(judged.fault, call.name, node)
        if remedy:
            advice = remedy
    if wider:
        advice += f", or run it in {wider}"
    return Cause(judged.fault, judged.evidence, advice)


def _cause_of_result(call: Call, index: int) -> Cause:
    finite = 0
    for _ in range(_REPEATS):
        result = _result(call, index)
        if not nonfinite_kind(result):
            finite += 1
    if finite:
        text = f"repeated on the same numbers, the result is finite {finite} of {_REPEATS} times"
        return cause("transient", text)
    formats = _INTEGERS_IN_DOUBLE
    if any(is_real(tensor) for tensor in call.tensors):
        formats = _IN_DOUBLE
    wide = _result(call, index, formats=formats)
    if wide.dtype not in formats.values():
        return cause("unknown", "the operation is not there in float64")
    kind = nonfinite_kind(wide)
    if not kind:
        return _cause_of_format(call, index, result.dtype, wide)
    text = f"in {_name(wide.dtype)} the result is {facts(wide).kind} as well"
    if kind == "Inf" and _overflows_double(call, index, formats):
        return cause("overflow", f"{text}, and finite for smaller numbers")
    return cause("mathematics", text)


def _overflows_double(call: Call, index: int, formats: Mapping[torch.dtype, torch.dtype]) -> bool:
    """Tell an overflow from a pole. Smaller numbers do not leave a pole at zero; beside others the result is moderate."""
    beside = _result(call, index, formats=formats, factor=1 - 1e-6)
    smaller = _result(call, index, formats=formats, factor=1e-3 / max(_largest_input(call), 1.0))
    if _is_finite(beside) and _largest(beside) < _HUGE:
        return False
    return _is_finite(smaller)


def _cause_of_format(call: Call, index: int, dtype: torch.dtype, wide: Tensor) -> Cause:
    limit = torch.finfo(dtype).max
    name = _name(dtype)
    largest = _largest(wide)
    text = f"in {_name(wide.dtype)} the result is finite, up to {largest:.4g}"
    if largest > limit:
        return cause("overflow", f"{text}; {name} holds numbers up to {limit:.4g}")
    fits = f"{name} (up to {limit:.4g})"
    within = f"{text}: inside the operation a number was too large for {fits}"
    most = _largest_input(call)
    longest = max([max(tensor.shape, default=1) for tensor in call.tensors], default=1)
    # A sum of squares can be as large.
    if most * most * longest > limit:
        return cause("overflow", within)
    other = _by_another_kernel(call, index)
    if other is not None and _is_finite(other):
        another = (
            f"another implementation in {name} gives finite numbers, up to {_largest(other):.4g}"
        )
        return cause("kernel", f"{text}, which fits into {fits}", another)
    if dtype == wide.dtype:
        return cause("unknown", "there is no wider format to repeat it in")
    return cause("overflow", within)


def _wider_format(call: Call, index: int) -> str:
    """Return the narrowest format in which the result is finite; empty if there is none."""
    dtype = _result(call, index).dtype
    for formats in (_IN_SINGLE, _IN_DOUBLE):
        if dtype not in formats or not _is_finite(_result(call, index, formats=formats)):
            continue
        # bfloat16 has the range of float32.
        if dtype == torch.float16 and formats is _IN_SINGLE:
            return "bfloat16 or float32"
        return _name(formats[dtype])
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _largest_input(call: Call) -> float:
    most = 0.0
    for tensor in call.tensors:
        if is_real(tensor) and tensor.numel():
            most = max(most, _largest(tensor))
    return most


def _by_another_kernel(call: Call, index: int) -> Tensor | None:
    from torch._decomp import decomposition_table  # noqa: PLC0415 # takes a while, and only here

    # The other implementation may refuse the arguments.
    with suppress(Exception):
        if call.func in decomposition_table:
            return _result(call, index, func=decomposition_table[call.func])
    with suppress(Exception):
        if any(tensor.device.type != "cpu" for tensor in call.tensors):
            return _result(call, index, device=torch.device("cpu"))
    return None


def _result(
    call: Call,
    index: int,
    *,
    formats: Mapping[torch.dtype, torch.dtype] = _SAME,
    factor: float = 1.0,
    func: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Repeat an operation on copies of its arguments, in other formats, scaled by a factor, or in another way."""

    def converted(value: Any) -> Any:
        if isinstance(value, Tensor):
            part = _dist.local(value.detach())
            part = part.to(device, formats.get(part.dtype), copy=True)
            if factor != 1.0 and is_real(part):
                part.mul_(factor)
            return part
        if isinstance(value, torch.device) and device is not None:
            return device
        # Some operations take the dtype of the result as an argument.
        if isinstance(value, torch.dtype):
            return formats.get(value, value)
        return value

    args, kwargs = tree_map(converted, (call.args, call.kwargs))
    if func is None:
        func = call.func
    return tensors_of(func(*args, **kwargs))[index]


def _is_finite(result: Tensor) -> bool:
    return not nonfinite_kind(result)


def _largest(tensor: Tensor) -> float:
    return max(map(abs, ends(elements(tensor))))


def _remedy(fault: Fault, operation: str, node: str) -> str:
    """Return the remedy for an operation, or for the operation whose derivative the node computes."""
    name = operation.rpartition(".")[2]
    differentiated = re.sub(r"Backward\d*$", "", node)
    tables = {
        "overflow": [(_OVERFLOW, name)],
        "mathematics": [(_BACKWARD, differentiated), (_FORWARD, differentiated), (_FORWARD, name)],
    }
    for table, stem in tables.get(fault, ()):
        key = stem.replace("_", "").lower()
        for names, remedy in table.items():
            if re.fullmatch(names, key):
                return remedy
    return ""
