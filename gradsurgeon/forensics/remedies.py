"""The remedies for operations that make NaN or infinities out of finite numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gradsurgeon.diagnosis import Fault

# By operation, in lower case without underscores: the remedy in the forward pass, and in the backward pass if it is
# another one.
_MATHEMATICS: tuple[tuple[str, str] | tuple[str, str, str], ...] = (
    (
        r"sqrt",
        "the root of a negative number is NaN: clamp the input with `clamp(min=0)`, or find out why it is negative",
        "the derivative of the root at 0 is infinite: add an epsilon inside of it, `(x + eps).sqrt()`; a `where` after "
        "it does not help",
    ),
    (
        r"rsqrt",
        "1 / sqrt(x) is infinite at 0 and NaN below: add an epsilon inside of it, `(x + eps).rsqrt()`",
        "the derivative of 1 / sqrt(x) at 0 is infinite: add an epsilon inside of it, `(x + eps).rsqrt()`",
    ),
    (
        r"log|log2|log10",
        "the logarithm of 0 is minus infinity, of a negative number NaN: use `log_softmax`, `logsigmoid` or `xlogy` "
        "of the numbers before, or clamp with `clamp(min=eps)`",
        "the derivative of the logarithm at 0 is infinite: use `log_softmax`, `logsigmoid` or `xlogy`, or clamp with "
        "`clamp(min=eps)` before it; a `where` after it does not help",
    ),
    (
        r"div|truedivide|reciprocal",
        "a division by 0: add an epsilon to the divisor, `clamp(min=eps)` it, or choose with `where` before the "
        "division, not after it",
        "the gradient of a division by 0: choose with `where` before the division, so that the divisor is never 0",
    ),
    (
        r"pow|float_?power",
        "a negative base with a fractional exponent is NaN, 0 with a negative exponent infinite: clamp the base "
        "with `clamp(min=eps)`",
        "the derivative of x ** p at 0 is infinite where p is below 1 (and for a tensor p it takes log(x)): clamp the "
        "base with `clamp(min=eps)`",
    ),
    (
        r"acos|asin",
        "acos and asin are NaN beyond -1 and 1, which rounding reaches: clamp with `clamp(-1 + eps, 1 - eps)`",
        "the derivative of acos and asin at -1 and 1 is infinite: clamp with `clamp(-1 + eps, 1 - eps)`",
    ),
    (
        r"(linalgvector|linalgmatrix)?norm",
        "the norm is not finite: look at its input",
        "the derivative of a norm at a vector of zeros is not finite: add an epsilon under the root, "
        "`(x.square().sum(-1) + eps).sqrt()`, or use `F.normalize(x, eps=...)`",
    ),
    (
        r"(cdist|pdist)(forward|backward)?",
        "",
        "the derivative of a distance of 0 is not finite: leave out pairs of a point with itself, or add an epsilon",
    ),
    (
        r"(std|var)(mean|correction)?",
        "the standard deviation or variance of one element is 0 / 0: pass `correction=0`, or skip groups of one element",
        "the derivative of a standard deviation of 0 is not finite: use `(x.var(...) + eps).sqrt()`",
    ),
    (
        r"mean|nanmean|median",
        "the mean of no elements is 0 / 0: skip empty batches, or divide the sum by `max(count, 1)`",
    ),
    (
        r"(log)?softmax(backwarddata)?",
        "a row is masked completely (-Inf in each element): leave one element of each row unmasked, mask with "
        "`torch.finfo(dtype).min` instead, or leave such rows out before the softmax, not after it",
        "a row of the softmax is masked completely: leave one element of each row unmasked, or leave such rows out",
    ),
    (
        r"logsumexp|logcumsumexp|logaddexp2?",
        "every summand is minus infinity: leave out such rows, or mask with `torch.finfo(dtype).min`",
        "every summand was minus infinity, and the gradient is Inf - Inf: leave out such rows, or mask with "
        "`torch.finfo(dtype).min`",
    ),
    (
        r"(scaleddotproduct|efficientattention|flashattention).*",
        "a query may attend to nothing (its row of the mask is -Inf or False throughout): let it attend to one "
        "position, or leave it out",
    ),
    (
        r"nllloss.*|crossentropyloss.*",
        "no target counts (all are `ignore_index`, or the batch is empty), so the mean is 0 / 0: skip such "
        "batches, or sum (`reduction='sum'`) and divide by `max(count, 1)`",
    ),
    (
        r"binarycrossentropy",
        "the input must lie between 0 and 1: use `binary_cross_entropy_with_logits` of the logits",
        "use `binary_cross_entropy_with_logits` of the logits",
    ),
    (
        r"ctcloss.*|cudnnctcloss.*",
        "a target is longer than its input can spell: pass `zero_infinity=True`, or drop such samples",
    ),
    (
        r"(linalg)?(inv|inverse|solve|cholesky|choleskysolve|invex|det|slogdet|logdet|pinv|lu).*",
        "the matrix is singular: add `eps * torch.eye(n)` to it",
    ),
    (
        r"mul|addcmul",
        "0 times an infinity is NaN: choose with `where` or `masked_fill` instead of multiplying by a mask",
        "0 times an infinity is NaN: choose with `where` before the operation, so that its derivative stays finite",
    ),
    (
        r"add|sub|rsub|sum|cumsum|addmm|mm|bmm|baddbmm|matmul",
        "infinities of both signs met, or an infinity met a 0: keep the mask out of this sum or product",
    ),
)

_OVERFLOW: tuple[tuple[str, str], ...] = (
    (
        r"exp|exp2|expm1|sinh|cosh|specialexp.*",
        "subtract the maximum before the exponential (as `softmax` and `logsumexp` do), or clamp the input",
    ),
    (
        r"pow|square|mul|addcmul|cumprod|prod",
        "compute the product or the power in float32 or wider, or scale the input down before it",
    ),
    (
        r"div|truedivide|reciprocal|rsqrt",
        "the divisor is too small for the format: add a larger epsilon to it, or divide in float32",
    ),
    (
        r"addmm|mm|bmm|baddbmm|matmul|linear|convolution|addbmm|dot|mv|addmv",
        "look at the weights and the input (the learning rate, the initialization, a missing normalization); "
        "in float16 scale one factor down before the product, or run it in bfloat16 or float32",
    ),
    (
        r"(scaleddotproduct|efficientattention|flashattention).*|(log)?softmax",
        "queries and keys have grown: normalize them (QK norm), scale them down before the product, or use bfloat16",
    ),
    (
        r"sum|cumsum|mean|norm|linalgvectornorm|var.*|std.*|native(layer|batch|group)norm|.*rmsnorm",
        "the sum, or the squares in it, are too large for the format: run it in float32 or wider, and find out why "
        "the numbers grow",
    ),
)

_NODE = re.compile(r"(?P<name>\w+?)Backward\d*")


def remedy(fault: Fault, operation: str, node: str) -> str:
    """Return the remedy for an operation, an empty text if none is known.

    Args:
        fault: the kind of fault.
        operation: the name in the dispatcher.
        node: the node of the graph, if the fault is in the backward pass.
    """
    made_by = _NODE.fullmatch(node)
    name = operation.rpartition(".")[2]
    if fault == "mathematics":
        told = _of(made_by["name"], _MATHEMATICS)[-1] if made_by else ""
        return told or _of(name, _MATHEMATICS)[0]
    return _of(name, _OVERFLOW)[0] if fault == "overflow" else ""


def _of(name: str, table: Iterable[tuple[str, ...]]) -> Sequence[str]:
    key = name.replace("_", "").lower()
    return next((told for names, *told in table if re.fullmatch(names, key)), [""])
