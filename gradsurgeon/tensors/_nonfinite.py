"""Finds and counts elements that are not finite, without a wait for the device where that is possible."""

import cmath
import math

import torch
from torch import Tensor

from gradsurgeon.tensors import _numbers, _torch

# Elements of a tensor on a device that are counted together, so that their copy stays small.
_COUNTED_AT_ONCE = 2**24


def nonfinite(grad: Tensor) -> Tensor | int:
    """Return the number of non-finite elements, as a number if the gradient is on the host."""
    elements = _numbers.values(grad)
    if _torch.is_host(elements):
        # Nearly always all elements are finite, and one pass for their sum proves it.
        if cmath.isfinite(elements.sum().item()):
            return 0
        return int(elements.isfinite().logical_not_().sum())
    if not (elements.is_floating_point() or elements.is_complex()):
        return 0
    cuts = elements.numel() // _COUNTED_AT_ONCE
    if cuts:
        # Flattening a transposed tensor would copy all of it.
        longest = elements.shape.index(max(elements.shape))
        return sum(map(nonfinite, elements.chunk(cuts + 1, longest)))
    # A finite number minus itself is 0, and another one NaN. The norm of order 0 counts what is not 0.
    number: Tensor = torch.linalg.vector_norm(
        elements - elements, 0, dtype=_numbers.widened(elements)
    )
    return number


def nonfinite_mark(grad: Tensor) -> Tensor | int:
    """Return the number of non-finite elements on the host; on a device a number that is finite if all elements are.

    The mark is one reduction without a copy: 0-dim float32.
    """
    elements = _numbers.values(grad)
    if _torch.is_host(elements):
        return nonfinite(elements)
    if elements.is_complex():
        # The absolute value of finite numbers may overflow.
        elements = torch.view_as_real(elements)
    if not (elements.is_floating_point() and elements.numel()):
        return 0
    largest: Tensor = torch.linalg.vector_norm(elements, math.inf, dtype=_numbers.widened(elements))
    if largest.dtype == torch.float64:
        # Float32 has no room for each finite number.
        largest = largest - largest
    return largest.float()


def first_nonfinite(grad: Tensor) -> tuple[str, int]:
    """Return ``NaN`` or ``Inf`` and the number of such elements. Waits for the device."""
    elements = _numbers.values(grad)
    nan_count = int(elements.isnan().sum())
    if nan_count:
        return "NaN", nan_count
    return "Inf", int(elements.isinf().sum())
