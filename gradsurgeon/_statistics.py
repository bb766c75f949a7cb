"""The statistics that can be recorded, of gradients of any layout and dtype.

They work on plain tensors, strided or sparse; those of sharded gradients are put together elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch


def statistics(stat: str, grads: Sequence[Tensor]) -> Tensor:
    """Return one statistic of each gradient. Shape ``[len(grads)]``, float32, on their device."""
    with torch.no_grad():
        if stat == "l2":
            return _numbers.norms(grads)
        # What an empty gradient has is not what a reduction of no elements says.
        if all(map(Tensor.numel, grads)) and (small := _numbers.small(grads)) is not None:
            return _OF_SEGMENTS[stat](*small).float()
        return torch.stack([statistic(stat, grad) for grad in grads])


def statistic(stat: str, grad: Tensor) -> Tensor:
    """Return one statistic of a gradient as a 0-dim float32 tensor on its device.

    Mean, extremes and zeros count the elements that a sparse gradient leaves out. An empty gradient
    has norm 0, and NaN for what needs an element.
    """
    if stat == "l2":
        return _numbers.norm(grad)
    elements = _numbers.values(grad)
    missing = grad.numel() - elements.numel()
    if elements.dtype in (torch.float16, torch.bfloat16):
        elements = elements.float()
    return _OF_ONE[stat](elements, missing).to(torch.float32)


def _none(elements: Tensor) -> Tensor:
    return torch.full((), math.nan, device=elements.device)


def _linf(elements: Tensor, _missing: int) -> Tensor:
    if not elements.numel():  # `vector_norm(inf)` and `amax` raise on empty tensors
        return torch.zeros((), device=elements.device)
    if elements.is_cpu and not elements.is_complex():
        # Two passes that write nothing take less time than one that does.
        return torch.maximum(elements.amax(), -elements.amin())
    return elements.abs().amax()


def _mean(elements: Tensor, missing: int) -> Tensor:
    return elements.sum() / (elements.numel() + missing) if elements.numel() else _none(elements)


def _std(elements: Tensor, missing: int) -> Tensor:
    if not elements.numel():
        return _none(elements)
    count = elements.numel() + missing
    mean = elements.sum() / count
    # Two passes: the difference of the mean square and the squared mean cancels.
    apart = elements - mean
    if apart.is_complex():
        apart = apart.abs()
    return ((apart.square_().sum() + missing * mean.abs().square()) / count).sqrt()


def _extreme(
    pick: Callable[[Tensor], Tensor], limit: Callable[..., Tensor]
) -> Callable[[Tensor, int], Tensor]:
    def extreme(elements: Tensor, missing: int) -> Tensor:
        if not elements.numel():
            return _none(elements)
        found = pick(elements)
        return limit(found, torch.zeros_like(found)) if missing else found

    return extreme


def _zeros(elements: Tensor, missing: int) -> Tensor:
    return elements.numel() + missing - elements.count_nonzero()


def _nonfinite(elements: Tensor, _missing: int) -> Tensor:
    total = elements.sum()
    # Nearly always all are finite, and where a look is free their sum says so in one pass.
    if _torch.is_host(total) and math.isfinite(abs(total.item())):
        return torch.zeros(())
    return elements.isfinite().logical_not_().sum()


_OF_ONE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "l1": lambda elements, _: elements.abs().sum(),
    "linf": _linf,
    "mean": _mean,
    "std": _std,
    "min": _extreme(torch.amin, torch.minimum),
    "max": _extreme(torch.amax, torch.maximum),
    "zeros": _zeros,
    "nonfinite": _nonfinite,
}


def _sums(flat: Tensor, lengths: Tensor) -> Tensor:
    # A plain sum, one after another, would lose digits in float32.
    return _numbers.by_segments(flat.double(), "sum", lengths)


def _stds(flat: Tensor, lengths: Tensor) -> Tensor:
    means = _sums(flat, lengths) / lengths
    apart = flat.double() - means.repeat_interleave(lengths, output_size=len(flat))
    return (_sums(apart.square_(), lengths) / lengths).sqrt_()


# Of many small tensors that lie one after another, none of them empty.
_OF_SEGMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda flat, lengths: _sums(flat.abs(), lengths),
    "linf": lambda flat, lengths: _numbers.by_segments(flat.abs(), "max", lengths),
    "mean": lambda flat, lengths: _sums(flat, lengths) / lengths,
    "std": _stds,
    "min": lambda flat, lengths: _numbers.by_segments(flat, "min", lengths),
    "max": lambda flat, lengths: _numbers.by_segments(flat, "max", lengths),
    "zeros": lambda flat, lengths: _sums(flat == 0, lengths),
    "nonfinite": lambda flat, lengths: _sums(flat.isfinite().logical_not_(), lengths),
}
