"""The remedies for operations that make NaN or infinities out of finite numbers.

Each table has regular expressions of operations: in lower case, without underscores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradsurgeon.diagnosis import Fault

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

_NODE = re.compile(r"(?P<name>\w+?)Backward\d*")


def remedy(fault: Fault, operation: str, node: str) -> str:
    """Return the remedy for an operation, an empty text if none is known.

    Args:
        fault: the kind of fault.
        operation: the name in the dispatcher.
        node: the node of the graph, if the fault is in the backward pass.
    """
    name = operation.rpartition(".")[2]
    if fault == "mathematics":
        made_by = _NODE.fullmatch(node)
        maker = made_by["name"] if made_by else ""
        return _of(maker, _BACKWARD) or _of(maker, _FORWARD) or _of(name, _FORWARD)
    return _of(name, _OVERFLOW) if fault == "overflow" else ""


def _of(name: str, table: Mapping[str, str]) -> str:
    key = name.replace("_", "").lower()
    return next((told for names, told in table.items() if re.fullmatch(names, key)), "")
